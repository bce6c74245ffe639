"""Whether a chunk's fields say the same thing: each is derived anew from the case's requests.

The CPU's prefill backend reads few of them. GPU backends and the scaled gather read the others: a
wrong one would not show in a result here.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import numpy as np

from equiv.loop.case import LoopCase


def contradictions(case: LoopCase, chunks: list[Any]) -> list[str]:
    """Name every field of the plan that isn't what the requests and the chunk's lengths give.

    Parameters
    ----------
    chunks : one rank's ``ContextChunk`` values.

    """
    offsets = [0, *accumulate(query for query, _ in case.requests)]
    covered = [0] * len(case.requests)
    wrong: list[str] = []
    for index, chunk in enumerate(chunks):
        first, stop = chunk.request_slice.start, chunk.request_slice.stop
        queries = [query for query, _ in case.requests[first:stop]]
        lengths = chunk.seq_lens.tolist()
        padded = list(chunk.padded_local_seq_lens)
        base = offsets[first]
        expected = {
            "index": index,
            "token_slice": slice(base, offsets[stop]),
            "continuation_token_end": offsets[first + 1],
            "is_continuation": covered[first] > 0,
            "num_context_tokens": sum(lengths),
            "query_start_loc": [offset - base for offset in offsets[first : stop + 1]],
            "max_query_len": max(queries),
            "cu_seq_lens": [0, *accumulate(lengths)],
            "max_seq_len": max(lengths),
            "token_to_seq": _repeated(lengths),
            "all_rows_active": all(queries) and all(lengths),
            "padded_local_cu_seq_lens": [0, *accumulate(padded)],
            "padded_local_token_to_seq": _repeated(padded),
            "num_local_context_tokens": sum(padded),
            "starts": list(chunk.local_starts),
        }
        for name, value in expected.items():
            found = getattr(chunk, name)
            found = found.tolist() if isinstance(value, list) else found
            if found != value:
                wrong.append(f"chunk {chunk.index}: {name} is {found}, expected {value}")
        for request, length in zip(range(first, stop), lengths, strict=True):
            covered[request] += length
    for request, (tokens, context) in enumerate(zip(covered, case.contexts, strict=True)):
        if tokens != context:
            wrong.append(f"request {request}: chunks hold {tokens} of {context} context tokens")
    return wrong


def _repeated(lengths: list[int]) -> list[int]:
    repeated: list[int] = np.repeat(np.arange(len(lengths)), lengths).tolist()
    return repeated
