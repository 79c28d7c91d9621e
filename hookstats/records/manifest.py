"""manifest.json and sites.json of a rank: which files count, and how far the ring was consumed. Read with suspicion.

The manifest is replaced as a whole, and this is the one moment at which parts and the ring's position change together.
Both carry a checksum, because a number that was changed would come back as another number.
"""

from __future__ import annotations

import json
import re
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

from hookstats.numbers.fields import FIELDS, Site
from hookstats.records import files
from hookstats.records.decoding import AttemptNumber, Count, Int64, decode, load, require
from hookstats.records.errors import RunError, SchemaError
from hookstats.records.schema import SCHEMAS, VERSION

_NAME = re.compile(r"[0-9]{8,18}\.parquet")


@dataclass(frozen=True)
class Part:
    """A Parquet file that counts."""

    file: Annotated[str, _NAME]
    level: Count  # how often its rows were merged
    rows: Count
    bytes: Count
    steps: tuple[Int64, Int64]  # the smallest and the largest
    footer: Count  # crc32 of the file's footer; each page has its own


@dataclass
class Attempt:
    """A process that recorded, and those that were resumed from it have a higher number."""

    attempt: AttemptNumber
    settings: dict[str, Any]
    begun: float  # seconds since the epoch
    consumed: Count = 0  # up to here everything in the ring is in parts
    records: Count = 0  # measured steps
    ended: str | None = None  # how
    dropped: Count = 0  # steps for which the ring had no room


@dataclass
class Manifest:
    attempts: list[Attempt] = field(default_factory=list)
    parts: dict[str, list[Part]] = field(default_factory=lambda: {table: [] for table in SCHEMAS})
    next_file: int = 1
    sites: list[Site] = field(default_factory=list)  # by id; they stand in sites.json
    read_sites: tuple[int, int] | None = None  # how many sites were read, and their checksum

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


@dataclass
class _Stored:
    """manifest.json, without its checksum."""

    schema: int
    fields: list[str]
    attempts: list[Attempt]
    parts: dict[str, list[Part]]
    next_file: Count
    sites: Count  # how many of sites.json count: those of a commit that did not come to its end may follow
    sites_crc32: Count


def read(directory: Path, known: Manifest | None = None) -> Manifest:
    """FileNotFoundError where there is none; RunError where it, or sites.json, is not what was written.

    known: an earlier one, whose sites and parts are not read again if they are the same.
    """
    path = directory / "manifest.json"
    try:
        return _read(path, known or Manifest())
    except RecursionError:
        raise RunError(f"{path}: expected a manifest, got JSON that is nested too deeply") from None


def _read(path: Path, known: Manifest) -> Manifest:
    body = load(path)
    require(isinstance(body, dict), path, "an object", body)
    if body.get("schema") != VERSION:
        got = str(body.get("schema"))[:40]
        raise SchemaError(
            f"{path}: expected schema version {VERSION}, got {got}: this run was recorded by another version of "
            "hookstats; read it with that one, or record into another directory"
        )
    expected = body.pop("crc32", None)
    require(expected == _checksum(body), path, f"the checksum {_checksum(body)}", expected)
    stored = decode(_Stored, _with_parts_of(known, body), path)
    require(stored.fields == list(FIELDS), path, f"fields {', '.join(FIELDS)}", stored.fields)
    require(set(stored.parts) == set(SCHEMAS), path, f"parts of {', '.join(SCHEMAS)}", list(stored.parts))
    numbers = [attempt.attempt for attempt in stored.attempts]
    require(numbers == sorted(set(numbers)), path, "ascending attempts", numbers)
    for parts in stored.parts.values():
        named = [part.file for part in parts]
        require(len(set(named)) == len(named), path, "each file once", named)
        for part in parts:
            require(part.steps[0] <= part.steps[1], path, "the first and the last step of a part", part.steps)
    told = (stored.sites, stored.sites_crc32)
    sites = known.sites
    if known.read_sites != told:
        sites = _sites(path.with_name("sites.json"), stored) if stored.sites else []
    ordered = {table: stored.parts[table] for table in SCHEMAS}
    return Manifest(stored.attempts, ordered, stored.next_file, sites, told)


def _with_parts_of(known: Manifest, body: dict[str, Any]) -> dict[str, Any]:
    """The same, with parts that are known already as they are: those of a long run are many, and few are new."""
    before = {_dump(vars(part)): part for parts in known.parts.values() for part in parts}
    told = body.get("parts")
    if not before or not isinstance(told, dict):
        return body
    parts = {
        table: [before.get(_dump(each), each) for each in raw] if isinstance(raw, list) else raw
        for table, raw in told.items()
    }
    return body | {"parts": parts}


def _sites(path: Path, stored: _Stored) -> list[Site]:
    try:
        listed = load(path)
    except FileNotFoundError:
        raise RunError(f"{path}: expected the names of {stored.sites} sites, got no file") from None
    require(isinstance(listed, list) and len(listed) >= stored.sites, path, f"{stored.sites} sites", listed)
    sites = [Site(*pair) for pair in decode(list[tuple[str, str]], listed[: stored.sites], path)]
    checksum = _checksum(_listed(sites))
    require(checksum == stored.sites_crc32, path, f"the checksum {checksum}", stored.sites_crc32)
    require(len(set(sites)) == len(sites), path, "each site once", len(sites))
    return sites


def _dump(value: Any, indent: int | None = None) -> bytes:
    return json.dumps(value, indent=indent, sort_keys=True, allow_nan=False).encode()


def _checksum(value: Any) -> int:
    return zlib.crc32(_dump(value))


def _listed(sites: list[Site]) -> list[list[str]]:
    return [list(site) for site in sites]
