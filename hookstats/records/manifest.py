"""manifest.json and sites.json of a rank: which files count, and how far the ring was consumed. Read with suspicion.

The manifest is replaced as a whole, and this is the one moment at which parts and the ring's position change together.
Both carry a checksum, because a number that was changed would come back as another number.
"""

from __future__ import annotations

import json
import re
import zlib
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from hookstats.numbers.fields import FIELDS, Site
from hookstats.records import files
from hookstats.records.errors import RunError, SchemaError
from hookstats.records.schema import SCHEMAS, VERSION

_LARGEST = 256 << 20  # bytes of a manifest, or of sites.json: more are not read
_INT64 = 2**63
_NAME = re.compile(r"[0-9]{8,18}\.parquet")


@dataclass(frozen=True)
class Part:
    """A Parquet file that counts."""

    file: str
    level: int  # how often its rows were merged
    rows: int
    bytes: int
    steps: tuple[int, int]  # the smallest and the largest
    footer: int  # crc32 of the file's footer; each page has its own


@dataclass
class Attempt:
    """A process that recorded, and those that were resumed from it have a higher number."""

    attempt: int
    settings: dict[str, Any]
    begun: float  # seconds since the epoch
    consumed: int = 0  # up to here everything in the ring is in parts
    records: int = 0  # measured steps
    ended: str | None = None  # how
    dropped: int = 0  # steps for which the ring had no room


@dataclass
class Manifest:
    attempts: list[Attempt] = field(default_factory=list)
    parts: dict[str, list[Part]] = field(default_factory=lambda: {table: [] for table in SCHEMAS})
    next_file: int = 1
    sites: list[Site] = field(default_factory=list)  # by id; they stand in sites.json

    def find(self, attempt: int) -> Attempt | None:
        return next((each for each in self.attempts if each.attempt == attempt), None)

    def to_json(self) -> dict[str, Any]:
        listed = _listed(self.sites)
        return {
            "schema": VERSION,
            "fields": list(FIELDS),
            "attempts": [asdict(attempt) for attempt in self.attempts],
            "parts": {table: [asdict(part) for part in parts] for table, parts in self.parts.items()},
            "next_file": self.next_file,
            "sites": len(listed),
            "sites_crc32": _checksum(listed),
        }

    def write(self, directory: Path) -> None:
        body = self.to_json()
        files.write_whole(directory / "manifest.json", _dump(body | {"crc32": _checksum(body)}, indent=1))

    def write_sites(self, directory: Path) -> None:
        files.write_whole(directory / "sites.json", _dump(_listed(self.sites)))


def read(directory: Path) -> Manifest:
    """FileNotFoundError where there is none; RunError where it, or sites.json, is not what was written."""
    path = directory / "manifest.json"
    try:
        return _read(path)
    except RecursionError:
        raise RunError(f"{path}: expected a manifest, got JSON that is nested too deeply") from None


def _read(path: Path) -> Manifest:
    body = _load(path)
    _is(isinstance(body, dict), path, "an object", body)
    if body.get("schema") != VERSION:
        raise SchemaError(
            f"{path}: expected schema version {VERSION}, got {str(body.get('schema'))[:40]}: this run was recorded by "
            "another version of hookstats; read it with that one, or record into another directory"
        )
    expected = body.pop("crc32", None)
    _is(expected == _checksum(body), path, f"the checksum {_checksum(body)}", expected)
    _is(set(body) == set(Manifest().to_json()), path, "the keys of a manifest", list(body))
    _is(body["fields"] == list(FIELDS), path, f"fields {', '.join(FIELDS)}", body["fields"])
    _is(isinstance(body["attempts"], list), path, "a list of attempts", body["attempts"])
    _is(isinstance(body["parts"], dict) and set(body["parts"]) == set(SCHEMAS), path, "parts by table", body["parts"])
    attempts = [_attempt(path, each) for each in body["attempts"]]
    numbers = [attempt.attempt for attempt in attempts]
    _is(numbers == sorted(set(numbers)), path, "ascending attempts", numbers)
    parts = {}
    for table in SCHEMAS:
        _is(isinstance(body["parts"][table], list), path, "a list of parts", body["parts"][table])
        parts[table] = [_part(path, each) for each in body["parts"][table]]
        named = [part.file for part in parts[table]]
        _is(len(set(named)) == len(named), path, "each file once", named)
    _is(_is_count(body["next_file"]), path, "the number of the next file", body["next_file"])
    sites = _sites(path.with_name("sites.json"), body["sites"], body["sites_crc32"]) if body["sites"] else []
    return Manifest(attempts, parts, body["next_file"], sites)


def _attempt(path: Path, d: Any) -> Attempt:
    names = {each.name for each in fields(Attempt)}
    _is(isinstance(d, dict) and set(d) == names, path, f"an attempt with {', '.join(sorted(names))}", d)
    counts = all(_is_count(d[name]) for name in ("attempt", "consumed", "records", "dropped")) and d["attempt"] < 2**31
    is_time = isinstance(d["begun"], int | float) and not isinstance(d["begun"], bool)
    is_ended = d["ended"] is None or isinstance(d["ended"], str)
    _is(counts and is_time and is_ended and isinstance(d["settings"], dict), path, "an attempt", d)
    return Attempt(**d)


def _part(path: Path, d: Any) -> Part:
    names = {each.name for each in fields(Part)}
    _is(isinstance(d, dict) and set(d) == names, path, f"a part with {', '.join(sorted(names))}", d)
    _is(isinstance(d["file"], str) and _NAME.fullmatch(d["file"]), path, "the name of a part", d["file"])
    _is(all(_is_count(d[name]) for name in ("level", "rows", "bytes", "footer")), path, "counts of a part", d)
    steps = d["steps"]
    is_range = isinstance(steps, list) and len(steps) == 2 and all(_is_int(step) for step in steps)
    _is(is_range and steps[0] <= steps[1], path, "the first and the last step of a part", steps)
    return Part(**d | {"steps": tuple(steps)})


def _sites(path: Path, count: Any, checksum: Any) -> list[Site]:
    """The first of them; those of a commit that did not come to its end may follow."""
    try:
        listed = _load(path)
    except FileNotFoundError:
        raise RunError(f"{path}: expected the names of {count} sites, got no file") from None
    _is(isinstance(listed, list) and _is_count(count) and len(listed) >= count, path, f"{count} sites", listed)
    listed = listed[:count]
    for each in listed:
        is_pair = isinstance(each, list) and len(each) == 2 and all(isinstance(part, str) for part in each)
        _is(is_pair, path, "[name, tensor] of a site", each)
    _is(_checksum(listed) == checksum, path, f"the checksum {_checksum(listed)}", checksum)
    sites = [Site(*each) for each in listed]
    _is(len(set(sites)) == len(sites), path, "each site once", count)
    return sites


def _load(path: Path) -> Any:
    size = path.stat().st_size
    _is(size <= _LARGEST, path, f"at most {_LARGEST} bytes", size)
    try:
        return json.loads(path.read_bytes(), parse_constant=_no_constant)
    except ValueError as error:
        raise RunError(f"{path}: expected JSON, got {str(error)[:200]}") from None


def _no_constant(name: str) -> None:
    raise ValueError(f"expected a number, got {name}")


def _dump(value: Any, indent: int | None = None) -> bytes:
    return json.dumps(value, indent=indent, sort_keys=True, allow_nan=False).encode()


def _checksum(value: Any) -> int:
    return zlib.crc32(_dump(value))


def _listed(sites: list[Site]) -> list[list[str]]:
    return [list(site) for site in sites]


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -_INT64 <= value < _INT64


def _is_count(value: Any) -> bool:
    return _is_int(value) and value >= 0


def _is(right: object, path: Path, expected: str, got: Any) -> None:
    if not right:
        raise RunError(f"{path}: expected {expected}, got {repr(got)[:200]}")
