"""``tokens.parquet``: a row for each scored token, text after text.

======================  =======  ==================================================================
column                  type     what
======================  =======  ==================================================================
text                    string
row                     uint32   i; the log-probability comes from the hidden state of position i
position                uint32   i + 1, of the token that is scored
exposed                 bool     whether the route can touch it
chunk                   uint32   scheduler chunk that computes it, from 0
``stock_1_1`` ...       float32  log-probability by run (arm, launch, repeat), in nats
d_nats                  float64  first fused run minus first stock run
ulp                     uint32   float32 values between the two
``top1_stock`` ...      int32    arg-max of the first run of each arm; null where none was stored
``margin_stock`` ...    float32  its log-probability above the second best's; null likewise
======================  =======  ==================================================================

One text is held at a time, so memory doesn't grow with the tokens. The file's metadata has
``bytegate.inputs_sha256``, that of ppl.json.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import polars as pl
from polars.io.plugins import register_io_source

from equiv.files import whole
from ppl import top1
from ppl.compare import ulp_distance
from ppl.errors import PplError
from ppl.evidence import PplEvidence
from ppl.runs import Run
from ppl.store import Stored

SLICE = 1 << 18
"""Rows of a frame and of a row group: 262,144."""


def column(run: Run) -> str:
    """Return the column of a run's log-probabilities: ``stock_1_1`` is launch 1, repeat 1."""
    arm, launch, repeat = run
    return f"{arm}_{launch}_{repeat}"


def schema(runs: list[Run]) -> pl.Schema:
    """Return the columns and their types."""
    types: dict[str, type[pl.DataType]] = {
        "text": pl.String,
        "row": pl.UInt32,
        "position": pl.UInt32,
        "exposed": pl.Boolean,
        "chunk": pl.UInt32,
        **{column(run): pl.Float32 for run in runs},
        "d_nats": pl.Float64,
        "ulp": pl.UInt32,
    }
    for arm in ("stock", "fused"):
        types |= {f"top1_{arm}": pl.Int32, f"margin_{arm}": pl.Float32}
    return pl.Schema(types)


def frames(made: PplEvidence, found: Stored) -> Iterator[pl.DataFrame]:
    """Yield the compared texts, at most ``SLICE`` rows at a time."""
    types = schema(made.runs)
    firsts = {arm: next(r for r in made.runs if r[0] == arm) for arm in ("stock", "fused")}
    for one in made.texts:
        here = {run: found[one.text, run] for run in made.runs}
        record = here[firsts["stock"]][1]
        values = {run: store.values(r) for run, (store, r) in here.items()}
        a, b = values[firsts["stock"]], values[firsts["fused"]]
        rows = np.arange(record.rows, dtype=np.uint32)
        columns: dict[str, object] = {
            "row": rows,
            "position": rows + 1,
            "exposed": rows >= record.exposed_from,
            "chunk": rows // np.uint32(record.budget),
            **{column(run): v for run, v in values.items()},
            "d_nats": b.astype(np.float64) - a,
            "ulp": ulp_distance(a, b).astype(np.uint32),
        }
        for arm, run in firsts.items():
            top = top1.load(*here[run])
            columns[f"top1_{arm}"] = None if top is None else top.ids[:, 0]
            columns[f"margin_{arm}"] = None if top is None else top.margins
        for at in range(0, record.rows, SLICE):
            part = {
                name: v[at : at + SLICE] if isinstance(v, np.ndarray) else None
                for name, v in columns.items()
            }
            yield (
                pl.DataFrame(part, schema_overrides={n: types[n] for n in part})
                .with_columns(text=pl.lit(one.text, pl.String))
                .select(types.names())
            )


def write(path: Path, made: PplEvidence, found: Stored) -> None:
    """Write the file whole or not at all.

    Raises
    ------
    PplError : a stored result is damaged, or the file can't be written.

    """
    failed: list[PplError] = []

    def source(
        with_columns: list[str] | None,
        predicate: pl.Expr | None,
        n_rows: int | None,
        batch_size: int | None,
    ) -> Iterator[pl.DataFrame]:
        del with_columns, predicate, n_rows, batch_size  # all is asked for
        try:
            yield from frames(made, found)
        except PplError as e:
            failed.append(e)
            raise

    lazy = register_io_source(source, schema=schema(made.runs))
    try:
        with whole(path) as fresh:
            lazy.sink_parquet(
                fresh,
                row_group_size=SLICE,
                metadata={
                    "bytegate.schema": "bytegate.ppl.tokens 1",
                    "bytegate.inputs_sha256": made.inputs_sha256,
                },
                engine="streaming",
            )
    except OSError as e:
        raise PplError(f"can't write {path}: {e.strerror or e}") from None
    except pl.exceptions.PolarsError as e:
        if failed:
            raise failed[0] from None
        raise PplError(f"can't write {path}: {e}") from None


def inputs_sha256(path: Path) -> str | None:
    """Return the digest of the results that a file was made from; None where it has none.

    Raises
    ------
    PplError : it can't be read.

    """
    try:
        return pl.read_parquet_metadata(path).get("bytegate.inputs_sha256")
    except (OSError, pl.exceptions.PolarsError) as e:
        raise PplError(f"can't read {path}: {e}") from None
