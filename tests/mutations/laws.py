"""Faults in the laws that every training keeps, and in what they read."""

from __future__ import annotations

from tests.mutations import Mutant

MUTANTS = [
    Mutant(
        "a sum of what ranks brought is taken for averaged twice",
        "hookstats/rules/laws.py",
        "np.isclose(factors[told], 1 / ranks, rtol=_EQUAL).all()",
        "np.isclose(factors[told], ranks, rtol=_EQUAL).all()",
        "tests/cluster/test_reduced.py",
    ),
    Mutant(
        "a layer is held against others, however many forwards each has",
        "hookstats/rules/ratios.py",
        "told = told[[count == 1 or count in kept for count in calls[told].tolist()]]",
        "told = told[[count == 1 for count in calls[told].tolist()]]",
        "tests/rules/test_laws.py -k accumulated",
    ),
    Mutant(
        "what a few numbers in bfloat16 add up to is taken for a sum in float32",
        "hookstats/rules/ratios.py",
        "        is_coarse |= (is_there >= _ENOUGH)",
        "        is_coarse &= (is_there >= _ENOUGH)",
        "tests/rules/test_laws.py -k bits",
    ),
    Mutant(
        "clipped values are taken for a factor",
        "hookstats/rules/ratios.py",
        " & ~_are_clipped(sides, deviates)",
        "",
        "tests/rules/test_laws.py -k one_gradient",
    ),
    Mutant(
        "a sum of losses is taken for their mean",
        "hookstats/watch/given_loss.py",
        " or node._saved_reduction != _MEAN",
        "",
        "tests/rules/test_cross_entropy.py -k why",
    ),
    Mutant(
        "what something else makes of logits is taken for them",
        "hookstats/watch/given_loss.py",
        "if expected and (node is None or node.name() not in expected):",
        "if expected and node is None:",
        "tests/rules/test_cross_entropy.py -k why",
    ),
    Mutant(
        "a softmax in bfloat16 is judged",
        "hookstats/watch/given_loss.py",
        "if inside.dtype not in (torch.float32, torch.float64) or",
        "if",
        "tests/rules/test_cross_entropy.py -k why",
    ),
    Mutant(
        "of several backwards all have the loss of the last",
        "hookstats/numbers/token_weights.py",
        "is_one = calls == ranks",
        "is_one = calls >= ranks",
        "tests/rules/test_cross_entropy.py -k size_alone",
    ),
    Mutant(
        "a gradient that is too small has no bound",
        "hookstats/numbers/token_weights.py",
        "least = -2.0 * expm1(-rows * loss) / rows if is_one else 0.0",
        "least = 0.0",
        "tests/rules/test_cross_entropy.py -k size_alone",
    ),
    Mutant(
        "the scale of a GradScaler is taken for a sum",
        "hookstats/rules/cross_entropy.py",
        "* step.ranks and not is_scale",
        "* step.ranks",
        "tests/rules/test_cross_entropy.py -k power_of_two",
    ),
    Mutant(
        "a gradient whose signs do not balance is in order",
        "hookstats/rules/cross_entropy.py",
        "abs(gradient.sum) > _SUM",
        "abs(gradient.sum) > 2",
        "tests/rules/test_cross_entropy.py -k balance",
    ),
    Mutant(
        "what the weights of tokens know to be no cross entropy is judged by its norm",
        "hookstats/rules/cross_entropy.py",
        'if not step.fired("token_weights").any():',
        "if True:",
        "tests/rules/test_cross_entropy.py -k weights_of_tokens",
    ),
    Mutant(
        "the place of a target is read as another one",
        "hookstats/language/token_weights.py",
        "is_other = (entries != targets) & (least != 0)",
        "is_other = (entries == entries) & (least != 0)",
        "tests/rules/test_cross_entropy.py -k told_nothing",
    ),
    Mutant(
        "what was written between two steps is looked for in measured steps alone",
        "hookstats/watch/step_law.py",
        "self._on[device] = torch.ones(1, dtype=torch.int32, device=device)",
        "self._on[device] = torch.zeros(1, dtype=torch.int32, device=device)",
        "tests/rules/test_step_law.py -k averaged",
    ),
    Mutant(
        "of several optimizers the parameters of one alone are looked at",
        "hookstats/watch/step_law.py",
        "self._stepped |= {each: sample",
        "self._stepped = self._stepped or {each: sample",
        "tests/rules/test_step_law.py -k several_optimizers",
    ),
    Mutant(
        "Adam's formula has no bias correction",
        "hookstats/watch/optimizer_law.py",
        "scale = lr / (1 - beta1**step)",
        "scale = lr",
        "tests/rules/test_optimizer_law.py -k formula",
    ),
    Mutant(
        "momentum is not Nesterov's where it is to be",
        "hookstats/watch/optimizer_law.py",
        'g.add_(new, alpha=momentum) if group["nesterov"] else new',
        "new",
        "tests/rules/test_optimizer_law.py -k formula",
    ),
    Mutant(
        "a step that is never made is within rounding",
        "hookstats/watch/optimizer_law.py",
        "_CLOSE, _ROUNDINGS = 1e-3, 8",
        "_CLOSE, _ROUNDINGS = 1.0, 8",
        "tests/rules/test_optimizer_law.py -k fault",
    ),
]
