"""Faults of the rooms that show a run: report, serve, terminal."""

from __future__ import annotations

from tests.mutations import Mutant

MUTANTS = [
    Mutant(
        "a site's past is what comes, too",
        "hookstats/report/reducing.py",
        "whole[:, :begin:every]",
        "whole[:, :end:every]",
        "tests/report/test_numbers.py -k past",
    ),
    Mutant(
        "of a column the largest value is shown, whatever its sign",
        "hookstats/report/reducing.py",
        "np.where(-low > high, low, high)",
        "high",
        "tests/report/test_numbers.py -k 'eight_times or distance'",
    ),
    Mutant(
        "what is not finite has the colour of a number",
        "hookstats/report/reducing.py",
        "found[is_bad] = NONFINITE",
        "pass",
        "tests/report/test_numbers.py -k not_finite",
    ),
    Mutant(
        "names close the script that holds them",
        "hookstats/report/page.py",
        '.replace("<", "\\\\u003c")',
        "",
        "tests/report/test_page.py -k hostile",
    ),
    Mutant(
        "effects have no end in a page",
        "hookstats/report/writing.py",
        "for effect in each.effects[:room]",
        "for effect in each.effects",
        "tests/report/test_numbers.py -k as_far_as_there_is_room",
    ),
    Mutant(
        "a gradient stands far from its activation",
        "hookstats/report/writing.py",
        "key=lambda i: (place[sites[i].name], i)",
        "key=lambda i: i",
        "tests/report/test_numbers.py -k beside_its_activation",
    ),
    Mutant(
        "any value is the token",
        "hookstats/serve/server.py",
        "if not any(_equal(each, token) for each in self._cookies()):",
        "if not self._cookies():",
        "tests/serve/test_server.py -k without_the_token",
    ),
    Mutant(
        "a name on another port is this server",
        "hookstats/serve/server.py",
        "if port != str(self.port):",
        "if False:",
        "tests/serve/test_server.py -k another_host",
    ),
    Mutant(
        "a page that has not changed but for its state is not sent",
        "hookstats/serve/routes.py",
        'tag = f"{self._version}-{hashlib.sha256(repr(state).encode()).hexdigest()[:8]}"',
        "tag = self._version",
        "tests/serve/test_growing.py -k told_at_once",
    ),
    Mutant(
        "a page is made anew whenever somebody asks",
        "hookstats/serve/routes.py",
        "time.monotonic() >= self._ended + rest",
        "True",
        "tests/serve/test_growing.py -k ten_seconds",
    ),
    Mutant(
        "bytes of an older page are those of the newest",
        "hookstats/serve/routes.py",
        "if made is None or version != self._version:",
        "if made is None:",
        "tests/serve/test_growing.py -k belong_to_a_version",
    ),
    Mutant(
        "of two runs the state of one that is over hides that the other grows",
        "hookstats/serve/runs.py",
        "kind = min((state.kind",
        "kind = max((state.kind",
        "tests/serve/test_growing.py -k as_long_as_one",
    ),
    Mutant(
        "watch ends with 0, however the run did",
        "hookstats/terminal/watching.py",
        'return int(state.kind == "died")',
        "return 0",
        "tests/records/test_endings.py -k 'an_attempt_says'",
    ),
    Mutant(
        "the best sites are called the worst",
        "hookstats/terminal/following.py",
        "key=_rank_badness, reverse=True",
        "key=_rank_badness",
        "tests/terminal/test_watching.py -k sites_with_findings",
    ),
    Mutant(
        "steps of before a resume stay on the screen",
        "hookstats/terminal/following.py",
        "run.steps[-1] < seen",
        "False",
        "tests/terminal/test_watching.py -k leave_the_screen",
    ),
    Mutant(
        "a name commands the terminal",
        "hookstats/terminal/formatting.py",
        'c if c.isprintable() or c == "\\n" else c.encode("unicode_escape").decode()',
        "c",
        "tests/terminal/test_watching.py -k command_a_terminal",
    ),
]
