"""A run that is kept: Parquet files whose names say what they hold, and reading them. numpy and pyarrow; no torch."""

from importlib.util import find_spec

if find_spec("pyarrow") is None:  # said where a run is begun or loaded, not by the process that would write it
    raise ImportError("recorded runs need pyarrow: pip install 'hookstats[record]'")
