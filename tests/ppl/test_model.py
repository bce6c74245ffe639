"""The small model: what is committed is what its card says, and it is a model of text."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from ppl import model  # noqa: E402 - torch decides first whether to go on
from ppl.errors import PplError  # noqa: E402
from ppl.model import corpus, evaluate, network, train  # noqa: E402
from ppl.model.overlap import LEAST_BYTES, shared  # noqa: E402
from texts import fetch, manifest  # noqa: E402
from texts.cut import LEAST, MOST, wanted_tokens  # noqa: E402
from texts.errors import TextError  # noqa: E402

CARD = (model.folder() / "README.md").read_text(encoding="utf-8")
FIGURES: dict[str, Any] = json.loads((model.folder() / "figures.json").read_text(encoding="utf-8"))
TEXTS = {t.id: t for t in manifest.builtin().text}
TEN = [t.id for t in manifest.builtin().default() if not t.long]

PASSAGE = """The two servers were started side by side in the afternoon, and each was given the same
long text. It was not a short matter: the first had answered before the second had read the half of
it, and when at last both numbers lay upon the table, they agreed in every place but one. "That
cannot be," said the engineer, and she read the last line again; for a difference of a single bit
is a difference, and she had been told that there was none. So the two servers were asked once
more, and the two servers answered once more, and the same line stood apart from all the others."""


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """On a machine that others use, threads that wait for each other take minutes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def ours() -> Any:
    return network.load(model.folder())


def scored(name: str) -> bytes:
    """Return a built-in text that is cached; without it the test is left out, by name."""
    try:
        return fetch.load(manifest.builtin(), TEXTS[name]).encode()
    except TextError as e:
        pytest.skip(str(e))


def bits(net: Any, data: bytes) -> float:
    found = evaluate.nats(net, np.frombuffer(data, np.uint8))
    return float(found.mean() / math.log(2))


# -- what is committed ---------------------------------------------------------------


def test_the_folder_is_small() -> None:
    files = [p for p in model.folder().rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    assert {"README.md", "config.json", "model.safetensors"} <= {p.name for p in files}
    assert sum(p.stat().st_size for p in files) <= model.MOST_BYTES


def test_the_card_speaks_of_these_weights() -> None:
    assert model.sha256() in CARD


def test_the_card_has_every_source_and_its_digest() -> None:
    for source in corpus.read().source:
        line = next(x for x in CARD.splitlines() if x.startswith(f"| {source.id} |"))
        assert source.sha256[:16] in line
        assert f"{source.size_bytes:,}" in line
        assert source.rights in line


def test_the_card_has_every_figure() -> None:
    rows = {x.split("|")[1].strip(): x for x in CARD.splitlines() if x.startswith("| ")}
    for name, row in FIGURES["texts"].items():
        assert f"| {row['bits_per_byte']:.3f} |" in rows[name]
        assert f"| {row['worst_ratio']:.3f} |" in rows[name]


def test_the_configuration_is_the_network_s() -> None:
    written = json.loads((model.folder() / "config.json").read_text(encoding="utf-8"))
    assert written == network.Shape().config()
    # The rows that vLLM's MLA backends take, and sizes that two and four ranks divide.
    assert written["kv_lora_rank"] + written["qk_rope_head_dim"] == 576
    for name in ("num_attention_heads", "vocab_size", "intermediate_size", "hidden_size"):
        assert written[name] % 4 == 0


def test_the_weights_are_bfloat16_and_finite(ours: Any) -> None:
    from safetensors.torch import load_file

    weights = load_file(model.folder() / model.WEIGHTS)
    assert {str(w.dtype) for w in weights.values()} == {"torch.bfloat16"}
    assert all(bool(torch.isfinite(w).all()) for w in weights.values())
    assert set(weights) == set(ours.state_dict())


# -- what it was asked for ----------------------------------------------------------


ENGLISH = [name for name in TEN if TEXTS[name].language.startswith("en")]


@pytest.mark.parametrize("name", ENGLISH)
def test_a_text_costs_no_more_than_was_asked_for(name: str) -> None:
    assert FIGURES["texts"][name]["bits_per_byte"] < evaluate.MOST_BITS


@pytest.mark.parametrize("name", ENGLISH)
def test_no_window_is_much_harder_than_the_median(name: str) -> None:
    assert FIGURES["texts"][name]["worst_ratio"] <= evaluate.MOST_RATIO


def test_shuffling_the_context_costs_a_tenth_of_a_nat_over_the_ten() -> None:
    assert np.mean([FIGURES["texts"][name]["shuffled_nats"] for name in TEN]) >= 0.1


def test_the_figures_are_of_these_weights() -> None:
    assert set(TEN) <= set(FIGURES["texts"])
    assert FIGURES["weights_sha256"] == model.sha256()


def test_it_reads_english(ours: Any) -> None:
    data = " ".join(PASSAGE.split()).encode()
    assert bits(ours, data) < evaluate.MOST_BITS
    shuffled = bytes(np.random.Generator(np.random.Philox(1)).permutation(list(data)).tolist())
    assert bits(ours, shuffled) > 4


def test_it_uses_what_it_has_read(ours: Any) -> None:
    data = " ".join(PASSAGE.split()).encode()
    far = evaluate.nats(ours, np.frombuffer(data + b" " + data, np.uint8))
    assert far[: len(data)].mean() - far[len(data) :].mean() > 0.1


def test_the_figures_are_this_model_s(ours: Any) -> None:
    data = scored("alice")[: evaluate.WINDOW]
    assert bits(ours, data) == pytest.approx(FIGURES["texts"]["alice"]["windows"][0], abs=2e-3)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", TEN)
def test_every_text_costs_what_the_card_says(ours: Any, name: str) -> None:
    ids = np.frombuffer(scored(name)[:MOST], np.uint8)
    scores = evaluate.nats(ours, ids)
    row = FIGURES["texts"][name]
    found = scores[: wanted_tokens(name, LEAST, MOST) - 1].mean() / math.log(2)
    assert found == pytest.approx(row["bits_per_byte"], abs=2e-3)
    by_window = evaluate.by_window(scores)
    assert by_window["worst_ratio"] == pytest.approx(row["worst_ratio"], abs=5e-3)
    assert by_window["windows"] == pytest.approx(row["windows"], abs=5e-3)


# -- tokens --------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "plain", "Zürich, 子曰, \U0001d550\n\t\x00"])
def test_tokens_are_bytes_and_come_back(text: str) -> None:
    ids = list(model.encode(text))
    assert ids == list(text.encode())
    assert model.decode(ids) == text
    assert model.decode([*ids, model.END]) == text


def test_an_id_that_is_no_token_is_refused() -> None:
    with pytest.raises(ValueError, match=r"0 \.\. 259"):
        model.decode([260])


# -- the network ---------------------------------------------------------------------

SMALL = network.Shape(hidden_size=32, intermediate_size=48, num_hidden_layers=2, rope_theta=1e4)


def small() -> Any:
    made = network.Network(SMALL)
    made.draw(torch.Generator().manual_seed(3))
    with torch.no_grad():
        for p in made.parameters():
            p.add_(0.2 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
    return made.eval()


def test_the_reference_is_what_transformers_computes(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    network.save(small(), tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float64, attn_implementation="eager"
    )
    reference = network.load(tmp_path, dtype=torch.float64)
    ids = torch.randint(0, 256, (1, 300), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        expected = theirs(ids).logits
        assert float((reference(ids) - expected).abs().max()) < 1e-4 * float(expected.abs().max())


def test_a_later_token_changes_nothing_before_it() -> None:
    net = small()
    ids = torch.randint(0, 256, (1, 40), generator=torch.Generator().manual_seed(5))
    other = ids.clone()
    other[0, 30] = (other[0, 30] + 1) % 256
    with torch.no_grad():
        moved = (net(ids) - net(other)).abs().amax(-1)[0]
    assert float(moved[:30].max()) < 1e-5 < float(moved[30:].min())


def test_a_folder_without_a_model_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(PplError, match="not a model of this shape"):
        network.load(tmp_path)


# -- windows -------------------------------------------------------------------------


def test_windows_are_bits_a_byte() -> None:
    scores = np.full(3 * evaluate.WINDOW - 1, math.log(2))
    scores[evaluate.WINDOW - 1 : 2 * evaluate.WINDOW - 1] *= 3
    assert evaluate.windows(scores).tolist() == pytest.approx([1.0, 3.0, 1.0])
    every = evaluate.windows(scores, evaluate.STRIDE)
    assert every.max() == pytest.approx(3.0)
    assert every[evaluate.WINDOW // 2 // evaluate.STRIDE] == pytest.approx(2.0, abs=1e-3)
    assert evaluate.by_window(scores)["worst_ratio"] == pytest.approx(3.0)


def test_a_changed_context_moves_what_follows(ours: Any) -> None:
    rng = np.random.Generator(np.random.Philox(6))
    words = np.frombuffer(" ".join(PASSAGE.split()).encode() * 3, np.uint8)
    scores = evaluate.nats(ours, words)
    assert evaluate.moved(ours, words, scores, budget=256) > 0.1
    noise = rng.integers(0, 256, words.size, dtype=np.uint8)
    assert evaluate.moved(ours, words, scores, budget=256, other=noise) > 0.1
    assert evaluate.moved(ours, words, scores, budget=256, other=words) == pytest.approx(
        0, abs=1e-4
    )


def test_far_context_is_the_first_tokens_and_nothing_else(ours: Any) -> None:
    words = np.frombuffer(" ".join(PASSAGE.split()).encode(), np.uint8)
    scores = evaluate.nats(ours, words)
    found = evaluate.far_context(ours, words, scores, 300)
    assert abs(found["moved_nats"]) > 1e-3  # the first tokens are others
    assert found["exposed_nats"] == pytest.approx(scores[299:].mean())
    even = np.full(500, 97, np.uint8)  # shuffled, it is what it was
    same = evaluate.far_context(ours, even, evaluate.nats(ours, even), 300)
    assert same["moved_nats"] == pytest.approx(0, abs=1e-6)


# -- training ------------------------------------------------------------------------


def folder_of(tmp_path: Path, **sources: bytes) -> Path:
    listed = [{"id": name, "weight": 1.0} for name in sources]
    (tmp_path / "corpus.json").write_text(json.dumps({"sources": listed}), encoding="utf-8")
    for name, data in sources.items():
        (tmp_path / f"{name}.bin").write_bytes(data)
    return tmp_path


def test_training_learns_and_repeats(tmp_path: Path) -> None:
    made = train.Corpus(folder_of(tmp_path, one=b"abcdefgh" * 800), "cpu", {})
    stage = train.Stage((train.Phase(32, 4, 12),), 1e-2, muon=True, weights={})
    found = []
    for _ in range(2):
        net = network.Network(SMALL)
        net.draw(torch.Generator().manual_seed(1))
        found.append(train.train(net, made, stage, device="cpu", compiled=False))
    one, two = (r["held_out_bits_per_byte"]["one"] for r in found)
    assert one == two < 4  # 8 bits at first


def test_a_mixture_lies_between_what_began_and_what_was_trained(tmp_path: Path) -> None:
    made = train.Corpus(folder_of(tmp_path, one=b"abcdefgh" * 800), "cpu", {})
    found = []
    for share in (1.0, 0.25):
        stage = train.Stage((train.Phase(32, 4, 3),), 1e-2, muon=True, weights={}, mix=share)
        net = small().train()
        start = {k: v.clone() for k, v in net.state_dict().items()}
        record = train.train(net, made, stage, device="cpu", compiled=False)
        assert record["mix"] == share
        found.append(net.state_dict())
    for name, began in start.items():
        expected = 0.75 * began + 0.25 * found[0][name]
        torch.testing.assert_close(found[1][name], expected)
        assert not torch.equal(found[1][name], began)


@pytest.mark.parametrize("arguments", [("--stage", "finish"), ("--mix", "0.5")])
def test_a_mixture_with_nothing_is_one_line(
    arguments: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder_of(tmp_path, one=b"abcdefgh" * 800)
    out = tmp_path / "out"
    assert train.main(["--corpus", str(tmp_path), "--out", str(out), *arguments]) == 2
    assert capsys.readouterr().err.startswith("bytegate: a mix of ")
    assert not out.exists()


def test_windows_stay_in_one_source_and_out_of_what_is_held_out(tmp_path: Path) -> None:
    made = train.Corpus(
        folder_of(tmp_path, a=b"a" * 2000 + b"x" * 20 + b"\xff", b=b"b" * 3000, c=b"c" * 9000),
        "cpu",
        {"c": 0.0},
    )
    drawn = made.windows(np.random.Generator(np.random.Philox(2)), 200, 64)
    assert drawn.shape == (200, 65)
    assert {frozenset(row.tolist()) for row in drawn} == {frozenset(b"a"), frozenset(b"b")}
    assert made.tokens[2020] == model.END


def test_disorder_keeps_what_a_window_holds() -> None:
    windows = torch.arange(200).repeat(400, 1)
    found = train.disordered(np.random.Generator(np.random.Philox(9)), windows, 0.5)
    assert torch.equal(found.sort(1).values, windows)
    moved = (found != windows).float().mean(1)
    assert 0.4 < float((moved == 0).float().mean()) < 0.6
    assert 0.15 < float((moved > 0.97).float().mean()) < 0.35
    assert 0.15 < float(((moved > 0) & (moved < 0.9)).float().mean()) < 0.35
    whole = train.disordered(np.random.Generator(np.random.Philox(9)), windows, 0.0)
    assert whole is windows


def test_the_rate_rises_and_falls() -> None:
    assert train.rate(0) == 0
    assert train.rate(train.WARMUP) == train.rate(train.HOLD) == 1
    assert train.rate(1) == 0


@pytest.mark.parametrize("main", [train.main, evaluate.main])
def test_what_is_missing_is_one_line(
    main: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "--corpus" if main is train.main else "--texts"
    assert main([name, str(tmp_path / "no"), "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("bytegate: ")
    assert said.count("\n") == 1
    assert "python -m ppl.model.corpus" in said
    assert not (tmp_path / "out").exists()


# -- what it was trained on -----------------------------------------------------------


def test_no_scored_text_is_a_training_text() -> None:
    training = corpus.read()
    files = {a.id: a.file for a in training.archive}
    for text in manifest.builtin().text:
        file = manifest.builtin().archive_of(text).file
        for part in text.part:
            for source in training.source:
                if files[source.archive] != file:
                    continue
                path = PurePosixPath(part.path)
                chosen = any(map(path.match, source.include))
                assert not chosen or any(map(path.match, source.exclude)), part.path


def test_a_shared_passage_is_found() -> None:
    rng = np.random.Generator(np.random.Philox(8))

    def words(count: int) -> bytes:
        return bytes(rng.integers(97, 123, count, dtype=np.uint8).tolist())

    planted = words(LEAST_BYTES)
    held = {"one": words(5000), "two": words(777) + planted.upper() + words(3000)}
    (found,) = shared(held, "t", words(1234) + planted + words(999))
    assert (found.source, found.size) == ("two", LEAST_BYTES)
    assert shared(held, "t", words(1234) + planted[1:] + words(999)) == []
    broken = planted[:90] + b" " + planted[90:]
    spaced = planted[:90] + b"\n  " + planted[90:]
    assert [p.source for p in shared({"s": broken + words(9)}, "t", spaced)] == ["s"]


def test_a_play_is_set_anew() -> None:
    found = corpus._play(
        "LEAR\n\nLear, King of Britain.\n\nACT I.\n\nScene I. A room.\n\n[Enter Kent.]\n\n"
        "Kent.\nI thought\nso.\n\nA song."
    )
    assert found == (
        "LEAR\n\nLEAR\tKing of Britain.\n\n\nACT I\n\n\nSCENE I\tA room.\n\n\t[Enter Kent.]\n\n"
        "KENT\tI thought\n\tso.\n\n\tA song."
    )


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("version = 1", "version = 2", "version"),
        ('archive = "django"', 'archive = "jango"', "no such archive"),
        ("weight = 1.5", "weight = 0.0", "weight"),
        ("[[source]]", "[[source", "can't read"),
    ],
)
def test_a_wrong_training_manifest_is_one_line(
    tmp_path: Path, old: str, new: str, says: str
) -> None:
    text = corpus.TRAINING.read_text(encoding="utf-8")
    path = tmp_path / "training.toml"
    path.write_text(text.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(PplError, match=re.escape(says)) as e:
        corpus.read(path)
    assert "\n" not in str(e.value)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_the_corpus_is_had_again_and_shares_nothing(tmp_path: Path) -> None:
    """Fetches 60 MB. Texts that aren't cached are not looked at, so all that pip has must be."""
    fetch.fetch(manifest.builtin(), manifest.builtin().default())
    assert corpus.main(["--out", str(tmp_path)]) == 0
