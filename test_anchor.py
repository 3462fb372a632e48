"""What RoPE, AnchorAttention, packing and training are, as properties that a wrong implementation breaks.

    python -m pytest                                   # all of it, under 4 minutes on two cores, no GPU needed
    python -m pytest -k visibility                     # one section
    ATTEND=my_file:my_function python -m pytest        # holds an attention of your own against every property

Sections: rotation, visibility, equivalence, model, data, training, bench, home, CUDA; `-k errors` takes the
refusals of the first ones. Hypothesis looks for the smallest row that breaks a property and prints it. With the
variable CI set its examples are fixed; by hand it explores anew.
"""
import codecs
import dataclasses
import gzip
import importlib
import importlib.util
import inspect
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import anchor_gpt
import bench
import data
import train
from anchor_gpt import (ATTENTIONS, GPT, GPTConfig, PreparedAttention, apply_rope, attend_by_mask, attention_mask,
                        document_lengths, draw_mask, position_ids, rope_cos_sin, visible_pairs)
from data import BOS, EOS, NO_TARGET, PackedRows, decode, encode, load_documents, split_documents

settings.register_profile("fixed", derandomize=True, deadline=None, max_examples=40, report_multiple_bugs=False)
settings.register_profile("anew", deadline=None, max_examples=40, report_multiple_bugs=False, print_blob=True)
settings.load_profile("fixed" if os.environ.get("CI") else "anew")

our_attend_by_document = anchor_gpt.attend_by_document
if "ATTEND" in os.environ:  # a reader's own attention takes our place, in the tests of the method and inside the model
    file, function = os.environ["ATTEND"].split(":")
    theirs = getattr(importlib.import_module(file), function)

    class TheirAttention(PreparedAttention):
        def __init__(self, doc_ids, attention, attend="document", device="cpu"):
            super().__init__(doc_ids, attention, attend, device)
            self.doc_ids = doc_ids

        def __call__(self, q, k, v, scale=None):
            if self.mask is not None:
                return super().__call__(q, k, v, scale)
            return theirs(q.to(v.dtype), k.to(v.dtype), v, self.doc_ids, self.attention)
    anchor_gpt.PreparedAttention = TheirAttention
    anchor_gpt.attend_by_document = theirs
attend_by_document = anchor_gpt.attend_by_document

every_kind = pytest.mark.parametrize("attention", ATTENTIONS)
both_ways = pytest.mark.parametrize("attend", [pytest.param(attend_by_mask, id="by_mask"),
                                               pytest.param(attend_by_document, id="by_document")])
seeds = st.integers(0, 2**16)
heads = st.sampled_from([(1, 1), (2, 1), (2, 2), (6, 2), (4, 4)])  # (n_head, n_kv_head)


@st.composite
def packings(draw, max_rows=3, max_tokens=12):
    """doc_ids (B, T): rows of an anchor and at least one document, each row packed in its own way."""
    n = draw(st.integers(1, max_tokens))
    rows = []
    for _ in range(draw(st.integers(1, max_rows))):
        ids = []
        while len(ids) < n:
            length = draw(st.integers(1, n - len(ids)))
            ids += [ids[-1] + 1 if ids else 1] * length
        rows.append([0] + ids)
    return torch.tensor(rows)


def random_qkv(doc_ids, seed, n_head=2, n_kv_head=1, head_dim=4, dtype=torch.float64):
    """Random q (B, H, T, D), k and v (B, H_kv, T, D) that require gradients."""
    generator = torch.Generator().manual_seed(seed)
    B, T = doc_ids.shape
    return [torch.randn(B, h, T, head_dim, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
            for h in (n_head, n_kv_head, n_kv_head)]


def outputs_and_gradients(attend, q, k, v, doc_ids, attention):
    """(output, dq, dk, dv) for a fixed random loss."""
    y = attend(q, k, v, doc_ids, attention)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(y.dtype)
    return y, *torch.autograd.grad((y * weights).sum(), (q, k, v))


def assert_close(got, expected, tolerance, what=""):
    error = (got.double() - expected.double()).abs().max().item() if got.numel() else 0.0
    assert got.shape == expected.shape and error <= tolerance, f"{what} off by {error:.3g}, allowed {tolerance:.3g}"


def tiny_model(attention="anchor", attend="document", seed=0, dtype=torch.float64, **sizes):
    """A model of two layers whose weights are large enough for attention to matter."""
    sizes = dict(vocab_size=13, context_length=16, n_layer=2, n_head=4, n_kv_head=2, n_embd=16, n_hidden=20) | sizes
    torch.manual_seed(seed)
    model = GPT(GPTConfig(**sizes, attention=attention, attend=attend)).double()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.5)
    return model.to(dtype)


def random_tokens(doc_ids, seed=0, vocab_size=13):
    return torch.randint(vocab_size, doc_ids.shape, generator=torch.Generator().manual_seed(seed))


# ----------------------------------------------------------------------------------------------------------------
# Rotation


def rotated(x, positions, dtype=torch.float64, **how):
    """x (D,) or (n, D), rotated to integer positions (n,) -> (n, D)."""
    positions = torch.as_tensor(positions).reshape(1, -1)
    cos, sin = rope_cos_sin(positions, x.shape[-1], dtype=dtype, **how)
    return apply_rope(x.expand(1, 1, positions.shape[1], -1), cos, sin)[0, 0]


def unit_vectors(seed, dtype=torch.float64, n=2, head_dim=64):
    x = torch.randn(n, head_dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return F.normalize(x, dim=-1).to(dtype)


positions_up_to = lambda bits: st.integers(0, 2**bits)


@given(seeds, positions_up_to(17))
def test_rotation_keeps_norms(seed, m):
    x = unit_vectors(seed)[0]
    assert abs(rotated(x, [m]).norm().item() - 1) < 1e-13


@given(seeds, positions_up_to(13), positions_up_to(13))
def test_rotation_by_a_then_b_is_rotation_by_a_plus_b(seed, a, b):
    x = unit_vectors(seed)[0]
    assert_close(rotated(rotated(x, [a]), [b]), rotated(x, [a + b]), 1e-11)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@given(seed=seeds)
def test_rotation_at_position_0_is_the_identity_exactly(dtype, seed):
    x = unit_vectors(seed, dtype)[0]
    assert torch.equal(rotated(x, [0], dtype)[0], x)


@given(seeds, positions_up_to(17), st.sampled_from([2, 8, 64]), st.sampled_from([10_000.0, 500_000.0]))
def test_rotation_turns_pair_i_and_i_plus_half_by_its_angle(seed, m, head_dim, theta):
    """Written out for each pair: (x_i, x_{i+D/2}) turns counterclockwise by m * theta^(-2i/D)."""
    x = unit_vectors(seed, head_dim=head_dim)[0]
    y, half = rotated(x, [m], theta=theta)[0], head_dim // 2
    for i in range(half):
        angle = m * theta ** (-2 * i / head_dim)
        turned = complex(x[i], x[i + half]) * complex(math.cos(angle), math.sin(angle))
        assert abs(complex(y[i], y[i + half]) - turned) < 1e-9


@given(seeds, positions_up_to(17), st.integers(0, 4096), st.integers(0, 2**16))
def test_rotation_makes_a_logit_depend_on_the_distance_alone_in_float64(seed, n, distance, shift):
    q, k = unit_vectors(seed)
    here = rotated(q, [n + distance]) @ rotated(k, [n]).T
    there = rotated(q, [n + distance + shift]) @ rotated(k, [n + shift]).T
    assert_close(here, there, 1e-11 if n + shift > 2**13 else 1e-12)


POSITIONS = [2**i for i in range(4, 18)]


def errors(precision):
    """The error of a logit of unit vectors at each of the positions, root mean square."""
    return [bench.logit_error(m, precision) for m in POSITIONS]


def test_rotation_in_float32_is_relative_up_to_2_to_the_17_with_an_error_that_does_not_grow():
    ours = errors("float32 throughout")
    assert max(ours) < 2e-8 and max(ours) < 1.5 * min(ours)


def test_rotation_with_float32_angles_drifts_and_float64_angles_are_why_ours_does_not():
    drift = errors("float32 angles")
    assert drift[-1] > 500 * drift[0] and drift[-1] > 5_000 * errors("float32 throughout")[-1]


def test_rotation_breaks_in_bfloat16_in_three_ways_of_which_one_grows_with_the_position():
    """1. Sound tables, but rotated q and k stored in bfloat16: what autocast leaves even the best code.
    2. The tables and the rotation in bfloat16, too: the paper's case, about 1.6 times as bad.
    Both round every number to 8 bits wherever it stands, so the error of a *single* logit does not grow with the
    position; what grows with the context is their sum over ever more queries.
    3. Positions or angles in bfloat16: grows, until positions collapse onto each other and the logit means nothing."""
    stored, tables, angles = map(errors, ("bfloat16 q and k", "bfloat16 tables, too (the paper)", "bfloat16 angles, too"))
    assert min(stored) > 20_000 * max(errors("float32 throughout"))
    assert max(stored) < 1.3 * min(stored) and max(tables) < 1.4 * min(tables)
    assert all(1.3 < t / s < 2.1 for t, s in zip(tables, stored))
    assert angles[0] > 10 * tables[0] and angles[-1] > 10 * angles[0]
    assert angles[-1] > 0.1  # a logit of two random unit vectors is 0.125


@given(seeds)
def test_rotation_in_bfloat16_moves_with_the_shift_except_for_the_anchor(seed):
    """The anchor's key stands at 0 under any packing, where nothing is rotated, so nothing is rounded."""
    k = unit_vectors(seed, torch.bfloat16)[0]
    anchor, document = rotated(k, [0, 16], torch.bfloat16)
    assert torch.equal(anchor, k)
    assert (document.double() - rotated(k.double(), [16])[0]).abs().max() > 1e-4


def test_rotation_tables_survive_autocast():
    positions = torch.arange(0, 4096, 7)[None]
    outside = rope_cos_sin(positions, 64)
    with torch.autocast("cpu", torch.bfloat16):
        inside = rope_cos_sin(positions, 64)
        x = torch.randn(1, 1, positions.shape[1], 64)
        turned = apply_rope(x, *inside)
    assert all(torch.equal(a, b) for a, b in zip(outside, inside))
    assert torch.equal(turned, apply_rope(x, *outside))


@pytest.mark.parametrize("spoil", ["autocast", "bfloat16 weights"])
def test_rotation_tables_inside_a_bfloat16_model_keep_positions_above_256_apart(spoil, monkeypatch):
    tables = []
    monkeypatch.setattr(anchor_gpt, "apply_rope", lambda x, cos, sin, dtype: tables.append((cos, sin)) or apply_rope(x, cos, sin, dtype))
    model = tiny_model(dtype=torch.bfloat16 if spoil == "bfloat16 weights" else torch.float32, n_head=1, n_kv_head=1)
    tokens = torch.zeros(1, 700, dtype=torch.int64)
    with torch.autocast("cpu", torch.bfloat16, enabled=spoil == "autocast"):
        model(tokens)
    angles = torch.arange(700.0, dtype=torch.float64)[:, None] * 10_000.0 ** -(torch.arange(0, 16, 2).double() / 16)
    assert len(tables) == 2  # one a layer
    for cos, sin in tables:
        assert_close(cos[0, 0], angles.cos(), 1e-7)
        assert_close(sin[0, 0], angles.sin(), 1e-7)


@given(seeds)
def test_rotation_takes_inputs_of_any_layout(seed):
    x = torch.randn(2, 5, 3, 8, generator=torch.Generator().manual_seed(seed))
    cos, sin = rope_cos_sin(torch.arange(5).expand(2, 5), 8)
    strided, expanded = x.transpose(1, 2), x[:, :, :1].transpose(1, 2).expand(2, 3, 5, 8)
    for view in (strided, expanded):
        assert torch.equal(apply_rope(view, cos, sin), apply_rope(view.contiguous(), cos, sin))


def test_rotation_keeps_the_dtype_and_computes_in_the_larger_one():
    x = torch.randn(1, 1, 9, 64).bfloat16()
    cos, sin = rope_cos_sin(torch.arange(9)[None] + 300, 64)
    assert apply_rope(x, cos, sin).dtype == torch.bfloat16
    assert torch.equal(apply_rope(x, cos, sin), apply_rope(x.float(), cos, sin).bfloat16())
    assert torch.equal(apply_rope(x, cos, sin, torch.float32), apply_rope(x.float(), cos, sin))
    assert cos.shape == (1, 1, 9, 32) and cos.dtype == torch.float32


def test_rotation_errors_odd_head_size_in_the_tables():
    with pytest.raises(ValueError, match="head_dim is 5, expected an even"):
        rope_cos_sin(torch.arange(3)[None], 5)


# ----------------------------------------------------------------------------------------------------------------
# Visibility


def may_see(row, i, j, attention):
    """The definition, for a row of document ids: query i may see key j."""
    if j > i:
        return False
    if attention == "full":
        return True
    if attention == "anchor" and j == 0:
        return True
    return row[i] == row[j]


def expected_mask(doc_ids, attention):
    T = doc_ids.shape[1]
    return torch.tensor([[[may_see(row, i, j, attention) for j in range(T)] for i in range(T)]
                         for row in doc_ids.tolist()])


@every_kind
@given(doc_ids=packings())
def test_visibility_mask_equals_the_definition(attention, doc_ids):
    mask = attention_mask(doc_ids, attention)
    assert mask.dtype == torch.bool and torch.equal(mask, expected_mask(doc_ids, attention))


@every_kind
@given(doc_ids=packings())
def test_visibility_counts_follow_the_closed_formula(attention, doc_ids):
    T = doc_ids.shape[1]
    for row, count in zip(doc_ids, visible_pairs(doc_ids, attention).tolist()):
        n = torch.bincount(row)[1:].tolist()
        formula = {"full": T * (T + 1) // 2, "anchor": 1 + sum(x * (x + 3) // 2 for x in n)}
        assert count == formula.get(attention, 1 + sum(x * (x + 1) // 2 for x in n))
        assert count == attention_mask(row[None], attention).sum()


def test_visibility_is_the_papers_figure_2():
    """An anchor and documents of 2, 3 and 1 tokens; x is visible. Then the position ids under it."""
    doc_ids = torch.tensor([[0, 1, 1, 2, 2, 2, 3]])
    pictures = {
        "full": ("x......", "xx.....", "xxx....", "xxxx...", "xxxxx..", "xxxxxx.", "xxxxxxx", "0123456"),
        "intra_doc": ("x......", ".x.....", ".xx....", "...x...", "...xx..", "...xxx.", "......x", "0123456"),
        "intra_doc_reset": ("x......", ".x.....", ".xx....", "...x...", "...xx..", "...xxx.", "......x", "0010120"),
        "anchor": ("x......", "xx.....", "xxx....", "x..x...", "x..xx..", "x..xxx.", "x.....x", "0123456"),
    }
    for attention, (*picture, positions) in pictures.items():
        mask = attention_mask(doc_ids, attention)[0]
        assert ["".join(".x"[cell] for cell in line) for line in mask.int().tolist()] == picture
        assert "".join(map(str, position_ids(doc_ids, attention)[0].tolist())) == positions


@every_kind
@given(doc_ids=packings(), seed=seeds)
def test_visibility_positions_run_on_or_count_within_each_document(attention, doc_ids, seed):
    torn = doc_ids[:, [0, *(1 + torch.randperm(doc_ids.shape[1] - 1, generator=torch.Generator().manual_seed(seed)))]]
    for ids in (doc_ids, torn):  # by mask, a document may be in pieces
        for row, got in zip(ids.tolist(), position_ids(ids, attention).tolist()):
            assert got == [row[:i].count(row[i]) if attention == "intra_doc_reset" else i for i in range(len(row))]


def compare_masks(got, doc_ids, attention):
    """Fails with a picture of both masks, expected and got (T, T), side by side."""
    expected = expected_mask(doc_ids, attention)[0]
    if not torch.equal(got, expected):
        wrong = [f"query {i} must {'see' if expected[i, j] else 'not see'} key {j}" for i, j in (got != expected).nonzero()]
        pictures = [draw_mask(mask, doc_ids[0]).split("\n") for mask in (expected, got)]
        width = max(2 * doc_ids.shape[1], len("expected")) + 4
        pytest.fail("\n".join([f"{attention}, doc_ids {doc_ids[0].tolist()}: {', '.join(wrong[:3])}", "",
                               f"{'expected':<{width}}got", *(f"{a:<{width}}{b}" for a, b in zip(*pictures))]), pytrace=False)


@both_ways
@every_kind
@given(doc_ids=packings(max_rows=1, max_tokens=8), seed=seeds)
def test_visibility_is_what_outputs_depend_on(attend, attention, doc_ids, seed):
    """Not read off a mask: the gradient of output i is nonzero in value j exactly where i sees j; in key j where i sees
    j and something else to weigh it against; in query j only for j = i."""
    q, k, v = random_qkv(doc_ids, seed)
    y = attend(q, k, v, doc_ids, attention)
    T = doc_ids.shape[1]
    grads = [torch.autograd.grad(y[:, :, i].square().sum(), (q, k, v), retain_graph=True) for i in range(T)]
    from_query, from_key, from_value = (torch.stack([g.abs().sum(dim=(0, 1, 3)) > 0 for g in gs]) for gs in zip(*grads))
    compare_masks(from_value, doc_ids, attention)
    visible = expected_mask(doc_ids, attention)[0]
    has_choice = visible.sum(dim=1, keepdim=True) > 1  # a softmax over one key is 1, whatever the query
    itself = torch.eye(T, dtype=torch.bool)
    assert not from_key[~visible].any() and from_key[visible & has_choice].all()
    assert not from_query[~itself].any() and from_query[itself & has_choice].all()


@pytest.mark.parametrize("attend", ["mask", "document"])
@every_kind
@given(doc_ids=packings(max_tokens=10), seed=seeds, where=st.integers(0, 10))
def test_visibility_through_the_whole_model(attend, attention, doc_ids, seed, where):
    """Changing one token changes nothing before it, nothing in other documents and nothing in other rows, bit for bit;
    changing the anchor reaches every document (anchor, full) or none (intra_doc)."""
    model = tiny_model(attention, attend, dtype=torch.float32)
    t, b = where % doc_ids.shape[1], seed % doc_ids.shape[0]
    tokens = random_tokens(doc_ids, seed)
    changed = tokens.clone()
    changed[b, t] = (tokens[b, t] + 1) % 13
    with torch.no_grad():
        difference = (model(tokens, doc_ids)[0] != model(changed, doc_ids)[0]).any(dim=-1)  # (B, T)
    expected = torch.zeros_like(difference)
    in_one_layer = expected_mask(doc_ids, attention)[b].float()
    expected[b] = (in_one_layer @ in_one_layer)[:, t] > 0  # in two layers; of these four kinds the same
    assert torch.equal(difference, expected)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("attention", [a for a in ATTENTIONS if a != "full"])
@given(doc_ids=packings(max_tokens=10), seed=seeds, where=st.integers(1, 10))
def test_visibility_stops_nan_and_infinity_at_the_end_of_a_document(attention, poison, doc_ids, seed, where):
    """By document only: a softmax over a mask multiplies hidden values by 0, and 0 * NaN is NaN."""
    b, t = seed % doc_ids.shape[0], 1 + (where - 1) % (doc_ids.shape[1] - 1)
    qkv = [x.detach() for x in random_qkv(doc_ids, seed)]
    clean = attend_by_document(*qkv, doc_ids, attention)
    for i in range(3):
        poisoned = [x.clone() for x in qkv]
        poisoned[i][b, :, t] = poison
        y = attend_by_document(*poisoned, doc_ids, attention)
        outside = torch.ones_like(doc_ids, dtype=torch.bool)
        outside[b] = doc_ids[b] != doc_ids[b, t]
        assert torch.equal(y.transpose(1, 2)[outside], clean.transpose(1, 2)[outside])


# ----------------------------------------------------------------------------------------------------------------
# Equivalence


def attend_by_hand(q, k, v, doc_ids, attention):
    """softmax(q k / sqrt(D)) v over the visible keys of each query, one query of one head at a time."""
    B, H, T, D = q.shape
    y = torch.empty_like(q)
    for b, row in enumerate(doc_ids.tolist()):
        for h in range(H):
            h_kv = h * k.shape[1] // H  # consecutive query heads share a key/value head
            for i in range(T):
                seen = [j for j in range(T) if may_see(row, i, j, attention)]
                weights = (k[b, h_kv, seen] @ q[b, h, i] / math.sqrt(D)).softmax(dim=0)
                y[b, h, i] = weights @ v[b, h_kv, seen]
    return y


@both_ways
@every_kind
@settings(max_examples=15)
@given(doc_ids=packings(max_tokens=8), seed=seeds, heads=heads)
def test_equivalence_to_attention_by_hand(attend, attention, doc_ids, seed, heads):
    q, k, v = (x.detach() for x in random_qkv(doc_ids, seed, *heads))
    assert_close(attend(q, k, v, doc_ids, attention), attend_by_hand(q, k, v, doc_ids, attention), 1e-12)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 2e-5)], ids=["float64", "float32"])
@every_kind
@given(doc_ids=packings(max_tokens=40), seed=seeds, heads=heads)
def test_equivalence_of_by_mask_and_by_document(attention, dtype, tolerance, doc_ids, seed, heads):
    """The same values and the same gradients, for any heads and any packing of each row."""
    q, k, v = random_qkv(doc_ids, seed, *heads, dtype=dtype)
    expected = outputs_and_gradients(attend_by_mask, q, k, v, doc_ids, attention)
    got = outputs_and_gradients(attend_by_document, q, k, v, doc_ids, attention)
    for what, a, b in zip(("output", "gradient of q", "gradient of k", "gradient of v"), got, expected):
        assert a.dtype == dtype
        assert_close(a, b, tolerance, what)


SIZES = {  # document lengths, query and key/value heads, head size: what real models have
    "one long document": ([599], 2, 1, 64), "long documents": ([70, 300, 257], 3, 1, 128), "many": ([9] * 40, 4, 4, 32),
}


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2**-5),
                                              (torch.float16, 2**-8)], ids=["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("size", SIZES)
@every_kind
def test_equivalence_of_by_document_and_float64_by_mask_at_real_sizes(attention, size, dtype, tolerance):
    """Values and gradients in every dtype; in the 16-bit ones to 8 units in the last place of the largest."""
    lengths, n_head, n_kv_head, head_dim = SIZES[size]
    doc_ids = torch.tensor([[0] + [d for d, n in enumerate(lengths, 1) for _ in range(n)]])
    inputs = [x.detach().to(dtype) for x in random_qkv(doc_ids, 0, n_head, n_kv_head, head_dim)]
    inputs[0] = 2 * inputs[0]  # sharper attention than the average over everything
    exact = outputs_and_gradients(attend_by_mask, *(x.double().requires_grad_() for x in inputs), doc_ids, attention)
    got = outputs_and_gradients(attend_by_document, *(x.requires_grad_() for x in inputs), doc_ids, attention)
    for what, a, b in zip(("output", "gradient of q", "gradient of k", "gradient of v"), got, exact):
        assert a.dtype == dtype
        assert_close(a, b, tolerance * b.abs().max().item(), what)


@every_kind
def test_equivalence_of_by_mask_and_by_document_through_the_whole_model(attention):
    doc_ids = torch.tensor([[0, 1, 1, 1, 2, 3, 3, 3], [0, 1, 2, 2, 2, 2, 2, 2], [0, 1, 1, 1, 1, 1, 1, 1]])
    tokens = random_tokens(doc_ids)
    by_mask, by_document = tiny_model(attention, "mask"), tiny_model(attention, "document")
    assert torch.equal(by_mask.head.weight, by_document.head.weight)
    for model in (by_mask, by_document):
        model.loss = model(tokens, doc_ids, tokens.roll(-1, dims=1))[1]
        model.loss.backward()
    assert_close(by_document.loss, by_mask.loss, 1e-12)
    for (name, a), b in zip(by_document.named_parameters(), by_mask.parameters()):
        assert_close(a.grad, b.grad, 1e-10, name)


@both_ways
@given(doc_ids=packings(), seed=seeds)
def test_equivalence_of_a_packed_document_and_the_document_alone_behind_its_anchor(attend, doc_ids, seed):
    q, k, v = (x.detach() for x in random_qkv(doc_ids, seed))  # already rotated: the same position ids in both
    packed = attend(q, k, v, doc_ids, "anchor")
    for b in range(doc_ids.shape[0]):
        for document in range(1, int(doc_ids[b].max()) + 1):
            here = torch.tensor([0] + (doc_ids[b] == document).nonzero()[:, 0].tolist())
            alone = F.scaled_dot_product_attention(q[b:b + 1, :, here], k[b:b + 1, :, here], v[b:b + 1, :, here],
                                                   is_causal=True, enable_gqa=True)
            assert_close(packed[b:b + 1, :, here[1:]], alone[:, :, 1:], 1e-12)


@pytest.mark.parametrize("attend", ["mask", "document"])
@pytest.mark.parametrize("attention", ["anchor", "intra_doc_reset"])
def test_equivalence_of_packed_and_alone_through_the_whole_model(attention, attend, monkeypatch):
    doc_ids = torch.tensor([[0, 1, 1, 1, 2, 3, 3, 3, 3]])
    tokens, model = random_tokens(doc_ids), tiny_model(attention, attend)
    packed, positions = model(tokens, doc_ids)[0], position_ids(doc_ids, attention)
    for document in (1, 2, 3):
        here = torch.tensor([0] + (doc_ids[0] == document).nonzero()[:, 0].tolist())
        monkeypatch.setattr(anchor_gpt, "position_ids", lambda doc_ids, attention: positions[:, here])
        assert_close(model(tokens[:, here])[0][:, 1:], packed[:, here[1:]], 1e-11)


@both_ways
@given(doc_ids=packings(max_rows=1), seed=seeds)
def test_equivalence_of_the_shared_anchor_and_a_bos_at_position_0_in_every_document(attend, doc_ids, seed):
    """The other way to get AnchorAttention: each document brings its own copy of the anchor, and documents see
    themselves alone. The gradient of the shared anchor is the sum of its copies'."""
    q, k, v = random_qkv(doc_ids, seed)
    weights = torch.randn(q.shape, generator=torch.Generator().manual_seed(1), dtype=q.dtype)
    weights[:, :, 0] = 0  # the anchor's own output stands once here and once a document there
    shared = attend(q, k, v, doc_ids, "anchor")
    where, ids = [0], [0]
    for document in range(1, int(doc_ids.max()) + 1):
        tokens = (doc_ids[0] == document).nonzero()[:, 0].tolist()
        where += [0] + tokens
        ids += [document] * (1 + len(tokens))
    copies = [x.detach()[:, :, where].requires_grad_() for x in (q, k, v)]
    separate = attend(*copies, torch.tensor([ids]), "intra_doc")
    where = torch.tensor(where)
    assert_close(separate[:, :, where > 0], shared[:, :, where[where > 0]], 1e-12)
    summed = torch.autograd.grad((separate * weights[:, :, where]).sum(), copies)
    for got, copied in zip(torch.autograd.grad((shared * weights).sum(), (q, k, v)), summed):
        assert_close(got, torch.zeros_like(got).index_add_(2, where, copied), 1e-12)


@given(doc_ids=packings(max_tokens=30), seed=seeds)
def test_equivalence_of_reset_and_running_positions_in_float64(doc_ids, seed):
    tokens = random_tokens(doc_ids, seed)
    assert_close(tiny_model("intra_doc_reset")(tokens, doc_ids)[0], tiny_model("intra_doc")(tokens, doc_ids)[0], 1e-10)


@pytest.mark.skipif("ATTEND" in os.environ, reason="what is rounded where is ours")
@pytest.mark.parametrize("float32_up_to, lost", [(0, True), (384, False)], ids=["as on a GPU", "as on a CPU"])
def test_equivalence_of_reset_and_running_positions_is_lost_where_bfloat16_is_rotated(float32_up_to, lost, monkeypatch):
    """In short documents a CPU neither rounds the rotated q and k nor computes the attention in bfloat16."""
    monkeypatch.setattr(anchor_gpt, "FLOAT32_UP_TO", float32_up_to)
    doc_ids = torch.tensor([[0] + [d for d in range(1, 9) for _ in range(64)]])
    tokens = random_tokens(doc_ids)
    difference = {}
    for dtype in (torch.float32, torch.bfloat16):
        with torch.no_grad():
            reset, running = (tiny_model(a, dtype=dtype, n_embd=64)(tokens, doc_ids)[0].float()
                              for a in ("intra_doc_reset", "intra_doc"))
        difference[dtype] = ((reset - running).norm() / running.norm()).item()
    assert difference[torch.float32] < 1e-5
    assert difference[torch.bfloat16] > 1e-2 if lost else difference[torch.bfloat16] < 2e-3


def test_equivalence_of_any_order_of_the_documents_under_reset():
    model = tiny_model("intra_doc_reset")
    documents = [random_tokens(torch.zeros(n), seed=n) for n in (4, 1, 6)]

    def outputs(order):
        tokens = torch.cat([torch.tensor([5])] + [documents[i] for i in order])[None]
        doc_ids = torch.tensor([[0] + [d for d, i in enumerate(order, 1) for _ in documents[i]]])
        return dict(zip(order, model(tokens, doc_ids)[0][0, 1:].split([len(documents[i]) for i in order])))
    first = outputs((0, 1, 2))
    for order in ((2, 1, 0), (1, 2, 0)):
        for i, y in outputs(order).items():
            assert_close(y, first[i], 1e-12)


@pytest.mark.parametrize("attention, depends", [("anchor", True), ("full", True), ("intra_doc", False),
                                                ("intra_doc_reset", False)])
def test_equivalence_of_a_document_anywhere_in_the_row_is_lost_with_an_anchor(attention, depends):
    """In exact arithmetic. What moves with the document is its distance to the anchor, and nothing else."""
    model, document = tiny_model(attention, context_length=200), random_tokens(torch.zeros(1, 5))
    at = {}
    for before in (1, 20, 100):
        tokens = torch.cat((torch.tensor([[7]]), random_tokens(torch.zeros(1, before), seed=1), document), dim=1)
        doc_ids = torch.tensor([[0] + [1] * before + [2] * 5])
        at[before] = model(tokens, doc_ids)[0][:, -5:]
    moved = max((at[before] - at[1]).abs().max().item() for before in (20, 100))
    assert moved > 0.1 if depends else moved < 1e-10


@every_kind
@given(doc_ids=packings(max_rows=3), seed=seeds)
def test_equivalence_of_a_row_in_a_batch_and_the_row_alone(attention, doc_ids, seed):
    q, k, v = (x.detach() for x in random_qkv(doc_ids, seed))
    together = attend_by_document(q, k, v, doc_ids, attention)
    for b in range(len(doc_ids)):
        row = slice(b, b + 1)
        assert_close(together[row], attend_by_document(q[row], k[row], v[row], doc_ids[row], attention), 1e-12)


@both_ways
@given(seed=seeds, n=st.integers(1, 20))
def test_equivalence_of_full_anchor_and_causal_attention_for_one_document(attend, seed, n):
    doc_ids = torch.tensor([[0] + [1] * n])
    q, k, v = (x.detach() for x in random_qkv(doc_ids, seed))
    causal = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    for attention in ("full", "anchor"):
        assert_close(attend(q, k, v, doc_ids, attention), causal, 1e-12)


@pytest.mark.parametrize("attention", ["full", "anchor"])
def test_equivalence_of_generation_and_teacher_forcing(attention):
    """Greedy steps take the likeliest token of one forward over the result."""
    model = tiny_model(attention)
    prompt = random_tokens(torch.zeros(3, 4))
    tokens = model.generate(prompt, 12, temperature=0)
    assert tokens.shape == (3, 16) and torch.equal(tokens[:, :4], prompt)
    assert torch.equal(model(tokens)[0][:, 3:-1].argmax(dim=-1), tokens[:, 4:])


def anchor_gradient_error(attend, inputs, doc_ids, weights, exact):
    """How far the gradient of the anchor's k and v is from exact, the larger of the two relative errors."""
    q, k, v = (x.detach().requires_grad_() for x in inputs)
    gradients = torch.autograd.grad((attend(q, k, v, doc_ids, "anchor") * weights).sum(), (k, v))
    return max(((got[:, :, 0].double() - right[:, :, 0]).norm() / right[:, :, 0].norm()).item()
               for got, right in zip(gradients, exact))


@pytest.mark.parametrize("float32_up_to", [0, 384], ids=["as on a GPU", "as on a CPU"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("weights", ["random", "ones"])
@pytest.mark.parametrize("n_documents, length", [(2, 300), (16, 8), (64, 30), (512, 4)])
def test_equivalence_of_the_anchors_gradient_however_many_documents_add_to_it(n_documents, length, weights, dtype,
                                                                              float32_up_to, monkeypatch):
    """The sum over all documents is not rounded after each: it is as good as that of by mask."""
    monkeypatch.setattr(anchor_gpt, "FLOAT32_UP_TO", float32_up_to)
    doc_ids = torch.tensor([[0] + [d for d in range(1, n_documents + 1) for _ in range(length)]])
    inputs = [x.detach() for x in random_qkv(doc_ids, 0, 2, 2, 64, dtype)]
    generator = torch.Generator().manual_seed(1)
    w = torch.ones(inputs[0].shape) if weights == "ones" else torch.randn(inputs[0].shape, generator=generator)
    w = w.to(dtype)
    q, k, v = (x.double().requires_grad_() for x in inputs)
    y = attend_by_mask(q, k, v, doc_ids, "anchor")
    exact = torch.autograd.grad((y * w.double()).sum(), (k, v))
    by_mask, by_document = (anchor_gradient_error(attend, inputs, doc_ids, w, exact)
                            for attend in (attend_by_mask, attend_by_document))
    assert by_document <= by_mask + 0.5 * torch.finfo(dtype).eps  # half a unit in the last place: 0.4 % in bfloat16


def test_equivalence_of_the_anchors_gradient_through_the_whole_model_under_autocast():
    doc_ids = torch.tensor([[0] + [d for d in range(1, 257) for _ in range(8)]])
    tokens = random_tokens(doc_ids, vocab_size=12)
    tokens[0, 0] = 12  # a token that stands nowhere else, as BOS
    targets = tokens.roll(-1, dims=1)
    gradient = {}
    for name, attend, dtype in (("exact", "mask", torch.float64), ("by mask", "mask", torch.float32),
                                ("by document", "document", torch.float32)):
        model = tiny_model(attend=attend, dtype=dtype, n_embd=64)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
            model(tokens, doc_ids, targets)[1].backward()
        gradient[name] = model.embedding.weight.grad[12].double()
    off = {name: ((g - gradient["exact"]).norm() / gradient["exact"].norm()).item() for name, g in gradient.items()}
    assert off["by document"] <= off["by mask"] + 0.002


@pytest.mark.parametrize("length", [1, 31, 200, 383])
def test_equivalence_of_short_bfloat16_documents_is_that_of_float32_on_a_cpu(length):
    """Neither the rotated q and k nor anything inside is rounded: only v, on its way in, and the output."""
    doc_ids = torch.tensor([[0] + [1] * length + [2] * length])
    q, k, v = (x.detach() for x in random_qkv(doc_ids, 0, 4, 2, 64, torch.float32))
    q, v = 2 * q, v.bfloat16()
    w = torch.randn(q.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    results = []
    for dtypes in ((torch.float64,) * 3, (torch.float32, torch.float32, torch.bfloat16)):
        inputs = [x.to(dtype).requires_grad_() for x, dtype in zip((q, k, v), dtypes)]
        with torch.autocast("cpu", torch.bfloat16):
            y = our_attend_by_document(*inputs, doc_ids, "anchor")
        results.append((y, *torch.autograd.grad((y * w.to(y.dtype)).sum(), inputs)))
    for what, exact, got, bound in zip(("output", "dq", "dk", "dv"), *results, (2**-8, 2e-4, 2e-4, 2**-8)):
        assert_close(got, exact, bound * exact.abs().max().item(), what)
    assert results[1][0].dtype == torch.bfloat16


class LargestTensor(TorchDispatchMode):
    """Watches every operation, in forward and backward, for the most elements of any result."""
    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else [result]:
            self.numel = max(self.numel, x.numel() if isinstance(x, torch.Tensor) else 0)
        return result


@every_kind
@pytest.mark.parametrize("n_kv_head", [1, 2])
def test_equivalence_needs_nothing_of_size_t_times_t(attention, n_kv_head):
    doc_ids = torch.tensor([[0] + [d for d in range(1, 32) for _ in range(33)]])
    q, k, v = random_qkv(doc_ids, 0, 2, n_kv_head, dtype=torch.float32)
    with LargestTensor() as largest:
        our_attend_by_document(q, k, v, doc_ids, attention).sum().backward()
    assert 0 < largest.numel <= 3 * q.numel()  # q, k and v in one, where T x T would be 128 * q.numel()


@pytest.mark.parametrize("call", [
    lambda a: attention_mask(torch.tensor([[0, 1]]), a), lambda a: position_ids(torch.tensor([[0, 1]]), a),
    lambda a: visible_pairs(torch.tensor([[0, 1]]), a), lambda a: GPTConfig(attention=a),
    lambda a: our_attend_by_document(*random_qkv(torch.tensor([[0, 1]]), 0), torch.tensor([[0, 1]]), a)])
def test_equivalence_errors_unknown_attention_lists_the_four(call):
    with pytest.raises(ValueError, match="'anker'.*full, intra_doc, intra_doc_reset, anchor"):
        call("anker")


@pytest.mark.parametrize("call", [
    lambda d: attention_mask(d, "window"), lambda d: position_ids(d, "window"), lambda d: visible_pairs(d, "window"),
    lambda d: our_attend_by_document(*random_qkv(d, 0), d, "window"),
    lambda d: attend_by_mask(*random_qkv(d, 0), d, "window")])
def test_equivalence_errors_a_kind_that_is_named_but_not_served_falls_through_nowhere(call, monkeypatch):
    monkeypatch.setattr(anchor_gpt, "ATTENTIONS", (*ATTENTIONS, "window"))
    with pytest.raises(ValueError, match="'window'.*a kind of your own has to be served here, too"):
        call(torch.tensor([[0, 1, 2]]))


@both_ways
@pytest.mark.parametrize("n_rows, n_tokens", [(2, 3), (1, 4)])
def test_equivalence_errors_q_of_other_rows_than_doc_ids(attend, n_rows, n_tokens):
    q = torch.zeros(n_rows, 1, n_tokens, 4)
    with pytest.raises(ValueError, match=rf"doc_ids is \(1, 3\), but q has {n_rows} rows of {n_tokens} tokens"):
        (our_attend_by_document if attend is attend_by_document else attend)(q, q, q, torch.tensor([[0, 1, 1]]), "anchor")


@pytest.mark.parametrize("doc_ids, says", [
    (torch.tensor([0, 1, 1]), r"\(3,\).*doc_ids\[None\]"), (torch.tensor([[0, 1]]).int(), "int32"),
    (torch.tensor([[0.0, 1.0]]), "float32"), (torch.zeros(1, 0, dtype=torch.int64), "non-empty"),
    (torch.tensor([[0, 1], [1, 1]]), r"doc_ids\[1, 0\] is 1: expected 0 at index 0"),
    (torch.tensor([[0, 1, 1], [0, 1, 0]]), r"doc_ids\[1, 2\] is 0"), (torch.tensor([[0, 0, 1]]), r"doc_ids\[0, 1\] is 0"),
    (torch.tensor([[0, 1, -1]]), r"doc_ids\[0, 2\] is -1")])
def test_equivalence_errors_doc_ids_of_another_form(doc_ids, says):
    for call in (lambda: attention_mask(doc_ids, "anchor"), lambda: position_ids(doc_ids, "anchor"),
                 lambda: document_lengths(doc_ids), lambda: visible_pairs(doc_ids, "anchor")):
        with pytest.raises(ValueError, match=says):
            call()


def test_equivalence_errors_a_document_torn_apart_is_refused_by_document_and_served_by_mask():
    torn = torch.tensor([[0, 1, 1, 2, 2], [0, 1, 2, 2, 1]])
    q, k, v = (x.detach() for x in random_qkv(torn, 0))
    for call in (lambda: our_attend_by_document(q, k, v, torn, "anchor"),
                 lambda: tiny_model()(random_tokens(torn), torn)):
        with pytest.raises(ValueError, match="document 1 of row 1 is in more than one piece"):
            call()
    assert_close(attend_by_mask(q, k, v, torn, "anchor"), attend_by_hand(q, k, v, torn, "anchor"), 1e-12)


# ----------------------------------------------------------------------------------------------------------------
# Model


def llama_by_hand(model, tokens, doc_ids):
    """The same model in the plainest words, from its weights: logits (B, T, V)."""
    c, w = model.config, dict(model.named_parameters())
    D, H, H_kv = c.n_embd // c.n_head, c.n_head, c.n_kv_head

    def norm(x, gain):
        return x / (x.square().mean(-1, keepdim=True) + c.norm_eps).sqrt() * gain
    positions = position_ids(doc_ids, c.attention)
    frequencies = c.rope_theta ** -(torch.arange(0, D, 2).double() / D)
    turn = torch.polar(torch.ones(()).double(), positions[:, :, None, None] * frequencies)  # (B, T, 1, D/2)

    def rope(x):  # (B, T, H, D)
        y = torch.complex(x[..., :D // 2], x[..., D // 2:]) * turn
        return torch.cat((y.real, y.imag), dim=-1)
    x = w["embedding.weight"][tokens]
    for i in range(c.n_layer):
        p = f"blocks.{i}."
        q, k, v = (norm(x, w[p + "attention_norm.weight"]) @ w[p + "attention.qkv.weight"].T).split(
            [H * D, H_kv * D, H_kv * D], dim=-1)
        q, k, v = rope(q.unflatten(-1, (H, D))), rope(k.unflatten(-1, (H_kv, D))), v.unflatten(-1, (H_kv, D))
        y = attend_by_hand(*(z.transpose(1, 2) for z in (q, k, v)), doc_ids, c.attention)
        x = x + y.transpose(1, 2).flatten(2) @ w[p + "attention.proj.weight"].T
        gate, up = (norm(x, w[p + "mlp_norm.weight"]) @ w[p + "mlp.gate_up.weight"].T).chunk(2, dim=-1)
        x = x + (gate * gate.sigmoid() * up) @ w[p + "mlp.proj.weight"].T
    return norm(x, w["norm.weight"]) @ w["embedding.weight"].T


@every_kind
def test_model_is_llamas_block(attention):
    doc_ids = torch.tensor([[0, 1, 1, 1, 2, 3, 3], [0, 1, 2, 2, 2, 2, 2]])
    model = tiny_model(attention, rope_theta=500.0, norm_eps=1e-2)
    with torch.no_grad():
        assert_close(model(random_tokens(doc_ids), doc_ids)[0], llama_by_hand(model, random_tokens(doc_ids), doc_ids), 1e-11)


def test_model_without_doc_ids_takes_each_row_for_one_document():
    model, tokens = tiny_model(), random_tokens(torch.zeros(2, 9))
    assert torch.equal(model(tokens)[0], model(tokens, torch.tensor([[0] + [1] * 8] * 2))[0])


def test_model_loss_is_the_mean_over_targets_in_float32():
    model = tiny_model(dtype=torch.bfloat16)
    tokens = random_tokens(torch.zeros(2, 9))
    targets = tokens.roll(-1, dims=1)
    targets[0, 3:] = NO_TARGET
    assert model(tokens, None, torch.full_like(targets, NO_TARGET))[1] == 0
    logits, loss = model(tokens, None, targets)
    assert logits.shape == (2, 9, 13) and logits.dtype == torch.bfloat16 and loss.dtype == torch.float32
    log_p = logits.double().log_softmax(dim=-1)
    picked = [-log_p[b, t, targets[b, t]] for b in range(2) for t in range(9) if targets[b, t] != NO_TARGET]
    assert_close(loss, sum(picked) / len(picked), 1e-5)
    targets[:, 1:] = targets[1] = NO_TARGET
    assert_close(model(tokens, None, targets)[1], picked[0], 1e-5)


def test_model_starts_as_nanogpt_does():
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_layer=8))
    assert model.head.weight is model.embedding.weight and not list(model.buffers())
    for name, p in model.named_parameters():
        if p.ndim == 1:
            assert (p == 1).all()
        else:
            assert p.std().item() == pytest.approx(0.02 / (4 if name.endswith("proj.weight") else 1), rel=0.03), name
            assert abs(p.mean().item()) < 5e-4
    assert not any(name.endswith("bias") for name, _ in model.named_parameters())


def test_model_defaults_are_those_of_train_on_a_cpu():
    defaults = dataclasses.asdict(GPTConfig())
    constants = {"vocab_size": data.VOCAB_SIZE, "rope_theta": 10_000.0, "norm_eps": 1e-5}
    assert defaults == constants | {name: cpu for name, (cpu, _, _) in train.SETTINGS.items() if name in defaults}


def test_model_looks_at_the_document_lengths_once_a_forward(monkeypatch):
    calls = []
    monkeypatch.setattr(anchor_gpt, "document_lengths", lambda d: calls.append(1) or document_lengths(d))
    tiny_model(n_layer=3)(torch.zeros(1, 5, dtype=torch.int64))
    assert len(calls) == 1


def test_model_generates_past_the_context_with_its_anchor_kept(monkeypatch):
    model, seen = tiny_model(context_length=6), []
    monkeypatch.setattr(model, "forward", lambda tokens: seen.append(tokens.clone()) or GPT.forward(model, tokens))
    tokens = model.generate(torch.tensor([[12, 1, 2, 3], [11, 4, 5, 6]]), 8, temperature=0)
    assert tokens.shape == (2, 12)
    for n, window in zip(range(4, 12), seen, strict=True):
        assert torch.equal(window, tokens[:, :n] if n <= 6 else torch.cat((tokens[:, :1], tokens[:, n - 5:n]), dim=1))


def test_model_samples_only_the_top_k_and_follows_the_temperature():
    model, prompts = tiny_model(), torch.tensor([[12, 3], [11, 5]])
    logits = model(prompts)[0][:, -1]
    torch.manual_seed(0)
    drawn = model.generate(prompts.repeat(100, 1), 1, temperature=9.0, top_k=3)[:, -1].view(100, 2)
    top = [set(x.tolist()) for x in logits.topk(3).indices]
    assert [set(x.tolist()) for x in drawn.T] == top
    assert {int(model.generate(prompts[:1], 1, temperature=9.0, top_k=3)[0, -1]) for _ in range(50)} == top[0]
    assert model.generate(prompts, 1, top_k=14).shape == (2, 3)  # more than there are
    for how, temperature in ((dict(temperature=2.0), 2.0), ({}, 1.0)):
        tokens = model.generate(prompts[:1].expand(4000, 2), 1, **how)
        assert tokens.shape == (4000, 3)
        assert_close(torch.bincount(tokens[:, -1], minlength=13) / 4000, (logits[0] / temperature).softmax(dim=-1), 0.03)
    assert torch.equal(model.generate(prompts, 3, top_k=1), model.generate(prompts, 3, temperature=0))


@pytest.mark.parametrize("attend", ["document", "mask"])
@every_kind
def test_model_compiles_once_for_all_packings(attention, attend):
    model, graphs = tiny_model(attention, attend, dtype=torch.float32), []
    compiled = torch.compile(model, backend=lambda graph, inputs: graphs.append(graph) or graph)
    for i in range(12):
        doc_ids = torch.cat([bench.log_normal_doc_ids(40, 8, seed) for seed in (2 * i, 2 * i + 1)])
        tokens = random_tokens(doc_ids, i)
        expected, loss = model(tokens, doc_ids, tokens)[1], compiled(tokens, doc_ids, tokens)[1]
        loss.backward()
        assert_close(loss, expected, 1e-6)
        if i == 0:
            n_graphs = len(graphs)
    assert len(graphs) == n_graphs > 0


def test_model_with_checkpoint_activations_runs_uncompiled_where_it_is_compiled():
    """PyTorch compiles no checkpointed block with a break in it: nothing is gained, nor compiled again and again."""
    model, graphs = tiny_model(dtype=torch.float32, checkpoint_activations=True), []
    compiled = torch.compile(model, backend=lambda graph, inputs: graphs.append(graph) or graph)
    for i in range(12):
        doc_ids = bench.log_normal_doc_ids(40, 8, i)
        tokens = random_tokens(doc_ids, i)
        assert torch.equal(compiled(tokens, doc_ids, tokens)[1], model(tokens, doc_ids, tokens)[1])
    assert not graphs


class NoFloat64OnTheDevice(TorchDispatchMode):
    """What Apple's GPUs do, on PyTorch's `meta` device, which computes shapes alone."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(x, torch.Tensor) and x.device.type == "meta" and x.dtype == torch.float64:
                raise TypeError(f"{func}: this device has no float64")
        return result


@pytest.mark.skipif("ATTEND" in os.environ, reason="ours runs on any device")
@every_kind
def test_model_needs_no_float64_on_its_device(attention):
    model = tiny_model(attention, dtype=torch.float32).to("meta")
    doc_ids = torch.tensor([[0, 1, 1, 2, 2, 2]])
    tokens = random_tokens(doc_ids).to("meta")
    with NoFloat64OnTheDevice():
        logits, loss = model(tokens, doc_ids, tokens)
        loss.backward()
        with pytest.raises(TypeError, match="no float64"):
            rope_cos_sin(tokens, 4)
    assert logits.device.type == "meta" and logits.shape == (1, 6, 13)


def test_model_figure_shows_the_four_kinds():
    figure = subprocess.run([sys.executable, anchor_gpt.__file__], capture_output=True, text=True, check=True,
                            env=os.environ | {"PYTHONIOENCODING": "utf-8"}, encoding="utf-8").stdout
    assert all(attention in figure for attention in ATTENTIONS)
    assert "b  ▓▓· · · ████· · · ·" in figure and "0 0 1 2 0 1 2 3 0 1" in figure


@pytest.mark.parametrize("sizes, says", [
    (dict(n_embd=10, n_head=4), "n_embd 10 is not divisible by n_head 4"),
    (dict(n_head=4, n_kv_head=3), "n_head 4 is not divisible by n_kv_head 3"),
    (dict(n_embd=12, n_head=4, n_kv_head=4), "12 / 4 = 3 is odd"),
    (dict(context_length=1), "context_length is 1, expected at least 2"), (dict(n_layer=0), "n_layer is 0"),
    (dict(rope_theta=0.0), "rope_theta is 0.0, expected more than 0"),
    (dict(attend="flash"), "'flash'.*\"document\" or \"mask\"")])
def test_model_errors_sizes_that_do_not_fit(sizes, says):
    with pytest.raises(ValueError, match=says):
        GPTConfig(**sizes)


def test_model_errors_the_smallest_model_is_none():
    assert GPT(GPTConfig(1, 1, 1, 1, 2, 1, context_length=2))(torch.zeros(1, 2, dtype=torch.int64))[0].shape == (1, 2, 1)


@pytest.mark.parametrize("how", [dict(temperature=-1.0), dict(top_k=0)])
def test_model_errors_sampling_out_of_range(how):
    with pytest.raises(ValueError, match="expected 0 or more, and at least 1 or None"):
        tiny_model().generate(torch.zeros(1, 2, dtype=torch.int64), 1, **how)


def test_model_errors_doc_ids_that_do_not_fit_the_tokens():
    with pytest.raises(ValueError, match=r"doc_ids is \(1, 2\), expected the shape of tokens, \(1, 3\)"):
        tiny_model()(torch.zeros(1, 3, dtype=torch.int64), torch.tensor([[0, 1]]))
    with pytest.raises(ValueError, match=r"tokens is \(3,\), expected \(B, T\)"):
        tiny_model()(torch.zeros(3, dtype=torch.int64))


# ----------------------------------------------------------------------------------------------------------------
# Data

corpora = st.lists(st.binary(max_size=12), min_size=1, max_size=12)


def packed(documents, context_length, seed):
    """PackedRows with a context short enough to fill a row."""
    return PackedRows(documents, min(context_length, sum(map(len, documents)) + len(documents) + 1), seed)


@given(corpora, st.integers(2, 20), seeds, st.integers(0, 2))
def test_data_packing_loses_and_repeats_nothing(documents, context_length, seed, epoch):
    """The rows of an epoch, laid end to end, are the documents in some order with an EOS behind each, up to a
    tail too short for a row."""
    rows = packed(documents, context_length, seed)
    first = epoch * rows.rows_per_epoch
    stream = torch.cat([rows.row(first + i)[0][1:] for i in range(rows.rows_per_epoch)]).tolist()
    n_tokens = sum(len(d) + 1 for d in documents)
    assert len(stream) == n_tokens - n_tokens % (rows.context_length - 1)
    text = "".join(map(chr, stream)).split(chr(EOS))
    whole, cut = text[:-1], text[-1]
    left = Counter("".join(map(chr, d)) for d in documents)
    left.subtract(whole)
    assert min(left.values()) >= 0
    assert not cut or any(n and d.startswith(cut) for d, n in left.items())


@given(corpora, st.integers(2, 20), seeds)
def test_data_rows_are_anchor_documents_and_targets_within_them(documents, context_length, seed):
    rows = packed(documents, context_length, seed)
    for i in range(2 * rows.rows_per_epoch):
        tensors = rows.row(i)
        assert all(x.dtype == torch.int64 and x.shape == (rows.context_length,) for x in tensors)
        tokens, doc_ids, targets = (x.tolist() for x in tensors)
        assert tokens[0] == BOS and BOS not in tokens[1:] and doc_ids[:2] == [0, 1]
        for t in range(1, rows.context_length - 1):  # a new document exactly behind an EOS
            assert doc_ids[t + 1] - doc_ids[t] == (tokens[t] == EOS)
        for t in range(rows.context_length):
            has_target = t + 1 < rows.context_length and (t == 0 or doc_ids[t] == doc_ids[t + 1])
            assert targets[t] == (tokens[t + 1] if has_target else NO_TARGET)


@given(corpora, st.integers(2, 20), seeds, st.lists(st.integers(0, 200), min_size=1, max_size=8))
def test_data_a_row_is_a_function_of_documents_seed_and_number(documents, context_length, seed, numbers):
    used, fresh = packed(documents, context_length, seed), lambda: packed(documents, context_length, seed)
    for i in numbers:
        assert all(torch.equal(a, b) for a, b in zip(used.row(i), fresh().row(i)))


@given(corpora, st.integers(2, 20), seeds, st.integers(0, 2))
def test_data_batches_take_every_row_of_an_epoch_once(documents, context_length, seed, epoch):
    rows = packed(documents, context_length, seed)
    n = rows.rows_per_epoch
    row = lambda *tensors: tuple(tuple(x.tolist()) for x in tensors)
    rows_of = lambda batch: [row(*tensors) for tensors in zip(*batch)]
    batch = [row for i in range(n) for row in rows_of(rows.shuffled_batch(epoch * n + i, 1))]
    assert Counter(batch) == Counter(row(*rows.row(epoch * n + i)) for i in range(n))
    assert batch == rows_of(packed(documents, context_length, seed).shuffled_batch(epoch * n, n))


@given(corpora, st.integers(2, 20), seeds, st.sampled_from([(1000, 1001), (7000, 7000)]))
def test_data_rows_of_token_ids_are_those_of_bytes(documents, context_length, seed, bos_eos):
    """One packing: ids of another tokenizer, here each byte's number and 2,000, in the place of the bytes."""
    bos, eos = bos_eos
    rows = packed(documents, context_length, seed)
    ids = PackedRows([[2000 + byte for byte in d] for d in documents], rows.context_length, seed, bos, eos)
    for i in range(rows.rows_per_epoch):
        tokens, doc_ids, targets = rows.row(i)
        renamed = {BOS: bos, EOS: eos, NO_TARGET: NO_TARGET}
        assert ids.row(i)[0].tolist() == [renamed.get(t, 2000 + t) for t in tokens.tolist()]
        assert torch.equal(ids.row(i)[1], doc_ids)
        assert ids.row(i)[2].tolist() == [renamed.get(t, 2000 + t) for t in targets.tolist()]


@given(corpora, st.integers(2, 20), seeds)
def test_data_rows_for_a_trainer_have_as_labels_what_its_shift_makes_the_targets(documents, context_length, seed):
    rows = packed(documents, context_length, seed)
    items = data.TrainerRows(rows)
    assert len(items) == rows.rows_per_epoch == len(list(items))
    for i, item in enumerate(items):
        tokens, doc_ids, targets = rows.row(i)
        assert same([item["input_ids"], item["doc_ids"]], [tokens, doc_ids]) and item["attention_mask"].all()
        assert item["labels"][0] == NO_TARGET and same(item["labels"][1:], targets[:-1])


@given(corpora, st.integers(2, 20), seeds)
def test_data_doc_ids_can_be_read_off_the_separators(documents, context_length, seed):
    rows = packed(documents, context_length, seed)
    tokens, doc_ids, _ = rows.shuffled_batch(0, 2 * rows.rows_per_epoch)
    assert torch.equal(anchor_gpt.doc_ids_from_separators(tokens, EOS), doc_ids)
    tokens[:, 0] = EOS  # as GPT-2's one special token would have it
    assert torch.equal(anchor_gpt.doc_ids_from_separators(tokens, EOS), doc_ids)


def test_data_every_epoch_and_every_seed_shuffles_documents_and_rows_anew():
    documents = [bytes([65 + i]) * 9 for i in range(20)]
    for corpus in (documents, [b"".join(documents)]):  # one long document: its rows alone can be shuffled
        epochs = [[PackedRows(corpus, 11, seed).row(20 * epoch + i)[0].tolist() for i in range(20)]
                  for seed in (0, 1) for epoch in range(5)]
        n = PackedRows(corpus, 11, 0).rows_per_epoch
        batches = [PackedRows(corpus, 11, seed).shuffled_batch(n * epoch, n)[0].tolist()
                   for seed in (0, 1) for epoch in range(5)]
        orders = epochs + batches if corpus is documents else batches
        assert all(a != b for i, a in enumerate(orders) for b in orders[:i])
        assert len({str(sorted(x)) for x in orders}) == 1


@given(corpora.filter(lambda d: len(d) > 1), st.floats(0.01, 0.99), seeds)
def test_data_split_holds_out_whole_documents(documents, val_fraction, seed):
    held = split_documents(documents, val_fraction, seed)
    assert Counter(held[0]) + Counter(held[1]) == Counter(documents) and all(held)
    assert abs(len(held[1]) - val_fraction * len(documents)) <= 1
    assert held == split_documents(documents, val_fraction, seed)


@given(st.text(), st.binary())
def test_data_bytes_are_tokens(text, raw):
    assert decode(encode(text)) == text and bytes(encode(raw)) == raw
    assert decode([BOS, *encode(text), EOS]) == text and decode([0xFF, 65]) == "\ufffdA"
    assert bytes(encode(raw.decode(errors="surrogateescape"))) == raw  # as in a command line


def write(folder, files):
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def test_data_a_folder_is_read_in_order_without_hidden_files_and_installed_packages(tmp_path):
    write(tmp_path, {"b/two.py": b"two", "a/c.py": b"c", "z.md": b"\xffone", "empty": b"", "B.md": b"B",
                     ".hidden": b"no", ".git/x": b"no", "b/.x/x": b"no", "site-packages/x.py": b"no",
                     "b/dist-packages/x.py": b"no"})
    assert load_documents(tmp_path) == [b"B", b"\xffone", b"c", b"two"]
    assert load_documents(str(tmp_path / ".hidden")) == [b"no"]  # asked for by name


FORMS = {  # what a file holds, and the documents in it
    "z.txt": (b" a\r\n\xff\n<|endoftext|>\n b \n<|endoftext|><|endoftext|>\n\nc\n",
              [b" a\r\n\xff", b"b", b"c\n"]),
    "text": (b"\n one <|endoftext|> ", [b"\n one"]),
    "plain.py": (b" \n", [b" \n"]),
    "c.jsonl": ('{"text": "é\u2028\\u2028x\\n"}\r\n\n{"text": ""}\n{"text": "<|endoftext|>b"}'.encode(),
                ["é\u2028\u2028x\n".encode(), b"<|endoftext|>b"]),
    "d.ndjson": (b'{"text": "a"}\n', [b"a"]),
    "E.JSONL": (b'{"text": "a"}\n', [b"a"]),
    "f.json": ('[{"text": "é<|endoftext|>"},\n {"text": "b", "id": 1}]'.encode(),
               ["é<|endoftext|>".encode(), b"b"]),
    "g.json.txt": (b'[{"text": "a"}]', [b'[{"text": "a"}]']),
}


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gz"])
@pytest.mark.parametrize("name", FORMS)
def test_data_what_a_file_is_decides_how_it_is_read_alone_and_in_a_folder(tmp_path, name, packed):
    content, expected = FORMS[name]
    name += (".GZ" if name.isupper() else ".gz") * packed
    for mark in (b"", codecs.BOM_UTF8):
        text = mark + content
        write(tmp_path, {name: gzip.compress(text) if packed else text, "~after": b"after"})
        assert load_documents(tmp_path / name) == expected
        assert load_documents(tmp_path) == [*expected, b"after"]


class Bar:
    """In tqdm's place, writes down how far it got."""

    def __init__(self, total, **how):
        self.total, self.n, self.how, self.seen = total, 0, how, []
        Bar.latest = self

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def update(self, n):
        self.n += n
        self.seen.append(self.n)


def test_data_a_bar_counts_the_bytes_of_the_files_on_a_terminal(tmp_path, monkeypatch):
    lines = b"".join(b'{"text": "%09d"}\n' % (i * 7919**2) for i in range(9000))
    files = {"a.jsonl": lines, "b.txt": b"b" * 999, "c.jsonl.gz": gzip.compress(lines)}
    write(tmp_path, files)
    monkeypatch.setattr(data, "tqdm", Bar)
    load_documents(tmp_path)
    bar = Bar.latest
    assert bar.n == bar.total == sum(map(len, files.values())) and bar.seen == sorted(bar.seen)
    assert len({n for n in bar.seen if n < len(lines)}) > 5  # within one file, too
    assert bar.how["disable"] is None and bar.how["leave"] is False and bar.how["delay"] > 0


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_data_utf_16_behind_a_byte_order_mark_is_text(tmp_path, encoding):
    mark = {"utf-16-le": b"\xff\xfe", "utf-16-be": b"\xfe\xff"}[encoding]
    write(tmp_path, {"a.txt": mark + "é\u0a0a\U0001f600<|endoftext|>b\n".encode(encoding),
                     "b.jsonl": mark + '{"text": "ü\u0a0a"}\r\n{"text": "d"}\r\n'.encode(encoding),
                     "c.json": mark + '[{"text": "e"}]'.encode(encoding),
                     "d.gz": gzip.compress(mark + "f".encode(encoding)), "e": mark + b"\xd8\xd8"})
    assert load_documents(tmp_path) == [
        "é\u0a0a\U0001f600".encode(), b"b\n", "ü\u0a0a".encode(), b"d", b"e", b"f", "\ufffd".encode()]


def test_data_what_is_left_out_is_counted_in_one_warning_for_each_reason(tmp_path):
    write(tmp_path, {"a": b"a", "b.bin": b"a" * 5000 + b"\0", "c.txt": b"\0<|endoftext|>c",
                     "d.jsonl": b'{"text": "\\u0000"}',
                     "package.json": b'{"name": "x"}', "sub/NUMBERS.JSON": b"[1]",
                     "sub/broken.json": b'[{"text":', "sub/other.json": b'[{"text": "x"}, {"txt": "b"}]'})
    with pytest.warns(UserWarning) as warned:
        assert load_documents(tmp_path) == [b"a", b"c"]
    nul, other = sorted((str(w.message) for w in warned), key=lambda message: "NUL" not in message)
    assert re.search(r"^left out: 3 documents with a NUL byte.*UTF-16.*b\.bin$", nul)
    assert re.search(r'^left out: 4 \.json files that are no list of {"text": ...}.*package\.json$', other)


def test_data_a_file_that_cannot_be_read_is_left_out_of_a_folder_with_a_warning(tmp_path, monkeypatch):
    write(tmp_path, {name: name.encode() for name in "abc"})
    our_open = Path.open

    def refuse(path, *how):
        if path.name in "ab":
            raise PermissionError(13, "Permission denied", str(path))
        return our_open(path, *how)
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.warns(UserWarning, match=r"left out: 2 files that cannot be read \(Permission denied\).*a$"):
        assert load_documents(tmp_path) == [b"c"]
    with pytest.raises(PermissionError, match="Permission denied.*b"):
        load_documents(tmp_path / "b")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
def test_data_links_in_a_loop_and_pipes_do_not_hold_it_up(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a").write_text("a")
    (tmp_path / "folder" / "up").symlink_to(tmp_path)
    for name, target in (("b", "c"), ("c", "b"), ("nowhere", "gone")):
        (tmp_path / name).symlink_to(tmp_path / target)
    os.mkfifo(tmp_path / "pipe")
    with pytest.warns(UserWarning) as warned:
        assert load_documents(tmp_path) == [b"a"]
    counts = [int(re.match(r"left out: (\d+) files that cannot be read", str(w.message))[1]) for w in warned]
    assert sorted(counts) == [1, 2]


def test_data_a_document_of_100_mb_is_rows_like_any_other():
    book = b"".join(b"%019d\n" % i for i in range(5_000_000))
    rows = PackedRows([b"short", book, b"", b"x"], 1001, seed=0)
    assert rows.rows_per_epoch == (100_000_000 + 5 + 1 + 4) // 1000
    tokens, doc_ids, _ = rows.row(50_000)
    order, ends, _ = rows.shuffle(0)
    begin = 50_000_000 - (ends[list(order).index(1)] - len(book) - 1)
    assert bytes(tokens[1:].tolist()) == book[begin:begin + 1000] and doc_ids[1:].tolist() == [1] * 1000


def test_data_default_corpus_is_the_standard_library():
    documents = load_documents()
    assert len(documents) > 500 and Path(dataclasses.__file__).read_bytes() in documents
    assert documents == load_documents()


def test_data_default_corpus_is_py_files_as_they_stand(tmp_path, monkeypatch):
    """Neither separators nor marks mean anything in them: the default run does not change by a bit."""
    write(tmp_path, {"b.py": codecs.BOM_UTF8 + b" a <|endoftext|> b", "a.py": b"c", "c.txt": b"no",
                     "d.parquet": b"", "e.jsonl": b"no", ".f.py": b"no", "g/h.py": b"\n", "i.PY.gz": b"no"})
    monkeypatch.setattr(data.sysconfig, "get_path", {"stdlib": tmp_path}.get)
    assert load_documents() == [b"c", codecs.BOM_UTF8 + b" a <|endoftext|> b", b"\n"]


def test_data_a_recall_document_has_its_fact_where_depth_says():
    for depth, place in ((0, 0), (0.5, 50), (1, 100)):
        for seed in range(5):
            document = data.recall_document(112, 1, seed, depth)
            assert document[place:place + 1] == b"<" and document.index(b"=") == place + 3


def test_data_description_draws_each_power_of_two_from_the_shortest_on():
    text = data.describe([b"a" * 9] * 4 + [b"b" * 40] * 2, [123, 124])  # 122 tokens
    bars = [line.split()[3:] for line in text.splitlines() if re.search(r"^ +\d+ - ", line)]
    assert bars == [["4", "█" * 40], ["0"], ["2", "█" * 20]]
    assert re.search(r"^full +100.0%$", text, re.MULTILINE)  # one column, 123: its 122 tokens just fill a row
    assert "too few tokens to fill one row of 124" in data.describe([b"a" * 9] * 4 + [b"b" * 40] * 2, [124])


def test_data_description_says_what_the_attention_kinds_save():
    text = data.describe([b"a" * 9] * 4 + [b"b" * 3], [11])
    assert "5 documents, 44 tokens" in text and "full                100.0%" in text
    # an anchor and two documents of four: of 45 pairs 1 + 2 * 10 are visible, or 1 + 2 * 14
    rows = PackedRows([b"abc"] * 4, 9, 0)
    doc_ids = rows.shuffled_batch(0, 2)[1]
    assert [data.visible_share(doc_ids, a) for a in ATTENTIONS] == [1.0, 21 / 45, 21 / 45, 29 / 45]


@pytest.mark.parametrize("name, content, says", [
    ("none", None, "does not exist: expected a folder.*jsonl.*json.*gz"),
    ("empty.txt", b"", "holds no text: expected a folder"),
    ("list.json", b"[]", "holds no text"),
    ("bad.jsonl", b'{"text": "a"}\n\n{"txt": "b"}\n', "bad.jsonl, line 3"),
    ("cut.jsonl", b'{"text": "a', "line 1"),
    ("list.jsonl", b'["text"]', "line 1"),
    ("number.jsonl", b'{"text": 3}', "line 1"),
    ("half.jsonl", b'{"text": "\\ud800"}', "line 1"),
    ("lines.json", b'{"text": "a"}\n{"text": "b"}', "is a .jsonl"),
    ("package.json", b'{"name": "x"}', r'expected a list of {"text": ...}'),
    ("numbers.json", b"[1]", "numbers.json.*TypeError"),
    ("no.txt.gz", b"text", "expected a whole gzip file"),
    ("cut.gz", gzip.compress(b"text")[:-9], "whole gzip file"),
    ("spoilt.gz", gzip.compress(b"a" * 99)[:10] + b"\xff" * 9, "whole gzip file"),
    ("lines.json.gz", gzip.compress(b'{"text": "a"}\n{"text": "b"}'), "lines.json.gz.* is a .jsonl"),
    ("x.parquet", b"PAR1", "x.parquet cannot be read.*read_parquet"),
    ("x.arrow", b"x", "x.arrow.*Dataset.from_file"),
    ("x.jsonl.ZST", b"x", "zstd -d"),
    ("x.xz", b"x", "xz -d"),
    ("x.bz2", b"x", "bzip2 -d")])
def test_data_errors_files_that_hold_no_documents(tmp_path, name, content, says):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=says):
        load_documents(tmp_path / name)
    if content and not name.endswith(".json"):  # in a folder never trained on without it
        (tmp_path / "a.txt").write_bytes(b"the rest")
        with pytest.raises(ValueError, match=says):
            load_documents(tmp_path)


def test_data_errors_a_binary_file_is_no_text(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"a\0")
    with pytest.warns(UserWarning, match="1 documents with a NUL byte"):
        with pytest.raises(ValueError, match="holds no text"):
            load_documents(tmp_path / "a.bin")


def test_data_errors_a_corpus_too_small():
    with pytest.raises(ValueError, match="1 documents have 4 tokens, too few to fill one row of 6"):
        PackedRows([b"abc"], 6, 0)
    with pytest.raises(ValueError, match="seed is -1, expected 0 or more"):
        PackedRows([b"abc"], 5, -1)
    assert len(PackedRows([b"abc"], 5, 0).row(0)[0]) == 5
    with pytest.raises(ValueError, match="context_length is 1"):
        PackedRows([b"abc"], 1, 0)
    with pytest.raises(ValueError, match="1 document, too few to hold one out"):
        split_documents([b"a"], 0.5, 0)
    for val_fraction in (0.0, 1.0):
        with pytest.raises(ValueError, match=f"val_fraction is {val_fraction}"):
            split_documents([b"a", b"b"], val_fraction, 0)


# ----------------------------------------------------------------------------------------------------------------
# Training


@pytest.fixture
def corpus(tmp_path):
    """A folder of twelve short documents."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for i in range(12):
        (folder / f"{i:02}.txt").write_text(f"document {i} " + "abcdefghijklmnop"[i:] * (i + 1))
    return folder


TINY = ("--device cpu --dtype float32 --context-length 24 --batch-size 2 --grad-accumulation 2 --steps 6 --warmup-steps 2 "
        "--n-layer 1 --n-head 2 --n-kv-head 1 --n-embd 8 --n-hidden 8 --eval-interval 3 --eval-rows 2 "
        "--val-fraction 0.3").split()


def run(corpus, out, *flags):
    """train.main in this process; -> the checkpoint it leaves."""
    train.main([*TINY, "--data", str(corpus), "--out", str(out), "--prompt", "a", *flags])
    return checkpoint_of(out)


def resume(out, *flags):
    train.main(["--resume", "--out", str(out), "--device", "cpu", *flags])
    return checkpoint_of(out)


def checkpoint_of(out):
    return torch.load(out / "checkpoint.pt", weights_only=True)


def same(a, b):
    """Bit-equality of nested dicts and lists of tensors and plain values."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def metrics_of(out):
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "tokens_per_second"} for line in lines]


def interrupt_in_step(monkeypatch, n, signum):
    """A signal to this process in the middle of the n-th optimizer step from here."""
    calls, step = [], train.train_step

    def interrupted(*args):
        calls.append(1)
        if len(calls) == n:
            os.kill(os.getpid(), signum)
        return step(*args)
    monkeypatch.setattr(train, "train_step", interrupted)


@pytest.mark.parametrize("n, signum, code", [(1, signal.SIGINT, 130), (2, signal.SIGINT, 130), (3, signal.SIGTERM, 143),
                                             (5, signal.SIGINT, 130), (6, signal.SIGTERM, 143)])
def test_training_interrupted_and_resumed_is_bit_identical(corpus, tmp_path, monkeypatch, capsys, n, signum, code):
    whole = run(corpus, tmp_path / "whole")
    with monkeypatch.context() as patch:
        interrupt_in_step(patch, n, signum)
        with pytest.raises(SystemExit) as stop:
            run(corpus, tmp_path / "parts")
    assert stop.value.code == code and checkpoint_of(tmp_path / "parts")["step"] == n
    assert f"python train.py --resume --out {tmp_path / 'parts'}" in capsys.readouterr().out
    parts = resume(tmp_path / "parts")
    assert same({k: parts[k] for k in ("model", "optimizer", "step")}, {k: whole[k] for k in ("model", "optimizer", "step")})
    assert metrics_of(tmp_path / "parts") == metrics_of(tmp_path / "whole")


@pytest.mark.skipif("ATTEND" in os.environ, reason="the process that is killed has our attention")
def test_training_killed_outright_goes_on_from_the_last_checkpoint(corpus, tmp_path):
    whole = run(corpus, tmp_path / "whole", "--steps", "400", "--eval-interval", "5", "--n-embd", "16")
    command = [sys.executable, train.__file__, *TINY, "--data", str(corpus), "--out", str(tmp_path / "parts"), "--prompt",
               "a", "--steps", "400", "--eval-interval", "5", "--n-embd", "16"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    metrics = tmp_path / "parts" / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and metrics.read_text().count("\n") > 20):
        time.sleep(0.01)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert 0 < checkpoint_of(tmp_path / "parts")["step"] < 400
    assert same(resume(tmp_path / "parts")["model"], whole["model"])
    assert metrics_of(tmp_path / "parts") == metrics_of(tmp_path / "whole")


def test_training_resumes_into_nothing_by_starting(corpus, tmp_path, capsys):
    whole = run(corpus, tmp_path / "whole")
    assert "starts at step 0" not in capsys.readouterr().out
    train.main([*TINY, "--data", str(corpus), "--out", str(tmp_path / "new"), "--resume"])
    assert same(checkpoint_of(tmp_path / "new")["model"], whole["model"])
    assert "starts at step 0" in capsys.readouterr().out


def test_training_that_fails_in_its_first_step_can_be_resumed(corpus, tmp_path, monkeypatch):
    whole = run(corpus, tmp_path / "whole")
    with monkeypatch.context() as patch, pytest.raises(KeyError):
        patch.setattr(train, "train_step", mock.Mock(side_effect=KeyError))
        run(corpus, tmp_path / "parts")
    assert checkpoint_of(tmp_path / "parts")["step"] == 0
    assert same(resume(tmp_path / "parts")["model"], whole["model"])


def test_training_anew_keeps_the_earlier_run(corpus, tmp_path, capsys):
    first = run(corpus, tmp_path)
    second = run(corpus, tmp_path, "--seed", "1")
    run(corpus, tmp_path, "--seed", "2")
    assert same(torch.load(tmp_path / "checkpoint-1.pt", weights_only=True), first)
    assert same(torch.load(tmp_path / "checkpoint-2.pt", weights_only=True), second)
    assert (tmp_path / "metrics-2.jsonl").exists() and "checkpoint-2.pt" in capsys.readouterr().out


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_training_on_a_full_disk_says_so_and_leaves_the_old_checkpoint(corpus, tmp_path):
    before = run(corpus, tmp_path)
    for name in ("checkpoint.new", "metrics.new"):
        (tmp_path / name).symlink_to("/dev/full")
        with pytest.raises(SystemExit, match=r"could not write: .*No space left.*checkpoint\.pt is as it was saved before.*--resume"):
            resume(tmp_path, "--steps", "12")
        assert same(checkpoint_of(tmp_path), before) and not (tmp_path / name).is_symlink()
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with mock.patch("train.keep_metrics"), pytest.raises(SystemExit, match="could not write: .*No space left"):
        resume(tmp_path, "--steps", "12")


def test_training_killed_while_it_saves_leaves_the_old_checkpoint(corpus, tmp_path, monkeypatch):
    def half_a_save(state, file):
        file.write(b"half")
        raise KeyboardInterrupt
    before = run(corpus, tmp_path)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(torch, "save", half_a_save)
        resume(tmp_path, "--steps", "12")
    assert same(checkpoint_of(tmp_path), before)
    run(corpus, tmp_path / "whole", "--steps", "6")
    assert same(resume(tmp_path, "--steps", "12")["model"], resume(tmp_path / "whole", "--steps", "12")["model"])


@pytest.mark.parametrize("how, says", [
    ("norm", r"the loss is \d\.\d+ and the norm of its gradient inf"),
    ("loss", r"the loss is inf and the norm of its gradient \d\.\d+"),
    ("both", "the loss is nan and .* nan")])
def test_training_stops_at_a_loss_or_a_gradient_that_is_not_finite(corpus, tmp_path, monkeypatch, how, says):
    good, step = run(corpus, tmp_path), train.train_step

    def spoilt(*args):
        loss, norm = step(*args)
        return loss * math.inf if how == "loss" else loss, norm * math.inf if how == "norm" else norm
    monkeypatch.setattr(train, "train_step", spoilt)
    if how == "both":
        monkeypatch.setattr(F, "cross_entropy", lambda logits, *_, **__: logits.sum() * math.nan)
    then = ".*checkpoint.pt is what was saved before.*lower --learning-rate"
    with pytest.raises(SystemExit, match=f"step 7: {says}{then}"):
        resume(tmp_path, "--steps", "9")
    assert same(checkpoint_of(tmp_path), good) and max(m["step"] for m in metrics_of(tmp_path)) == 6


@pytest.mark.parametrize("end", ["the last step", "a signal", "divergence", "an error"])
def test_training_gives_the_signals_back_on_every_way_out(corpus, tmp_path, monkeypatch, end):
    handlers = {s: lambda signum, frame: None for s in (signal.SIGINT, signal.SIGTERM)}
    before = {s: signal.signal(s, handler) for s, handler in handlers.items()}
    try:
        if end == "a signal":
            interrupt_in_step(monkeypatch, 2, signal.SIGINT)
        elif end != "the last step":
            diverge = mock.Mock(return_value=[torch.tensor(math.nan)] * 2)
            fail = mock.Mock(side_effect=KeyError)
            monkeypatch.setattr(train, "train_step", diverge if end == "divergence" else fail)
        expected = {"the last step": (), "an error": KeyError}.get(end, SystemExit)
        with pytest.raises(expected) if expected else nullcontext():
            run(corpus, tmp_path)
        assert {s: signal.getsignal(s) for s in handlers} == handlers
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)


def test_training_never_saves_weights_that_are_not_finite(corpus, tmp_path, monkeypatch):
    good, step = run(corpus, tmp_path), train.train_step

    def poisoned(model, *args):
        result = step(model, *args)
        model.norm.weight.data[0] = math.nan
        return result
    monkeypatch.setattr(train, "train_step", poisoned)
    with pytest.raises(SystemExit, match="step 7: the weights are not finite"):
        resume(tmp_path, "--steps", "7")
    assert same(checkpoint_of(tmp_path), good)


class Intruder:
    """Unpickled by anything less careful than weights_only=True, it makes a folder."""

    def __reduce__(self):
        return os.mkdir, ("intruded",)


def with_settings(**settings):
    def change(path, corpus):
        checkpoint = torch.load(path, weights_only=True)
        checkpoint["settings"] |= settings
        torch.save(checkpoint, path)
    return change


def another_corpus(path, corpus):
    last = corpus / "11.txt"
    last.write_text(last.read_text().replace("d", "b", 1))  # as many documents, as many bytes


@pytest.mark.parametrize("spoil, flags, says", [
    (None, "--n-embd 16", "--n-embd 16, but the run in"),
    (None, "--attention full", "--attention full, but the run in"),
    (None, "--seed 3", "--seed 3, but the run in"),
    (None, "--learning-rate 0.1", "--learning-rate 0.1, but the run in"),
    (None, "--dtype bfloat16", "--dtype bfloat16, but the run in .* was made with float32"),
    (None, "--batch-size 4", "--batch-size 4 --grad-accumulation 2: 8 rows a step, but the run in .* has 4"),
    (None, "--steps 5", "--steps 5: the checkpoint in .* is at step 6 already"),
    (another_corpus, "--steps 9", "resuming needs the same documents"),
    (with_settings(dropout=0.5), "", "settings that this train.py does not know: dropout"),
    (with_settings(n_embd=16), "", "weights are not those of its settings"),
    (with_settings(data=Intruder()), "", "not a complete checkpoint"),
    (lambda path, corpus: path.write_bytes(path.read_bytes()[:-100]), "", "not a complete checkpoint"),
    (lambda path, corpus: path.write_bytes(b""), "", "not a complete checkpoint"),
    (lambda path, corpus: path.write_text("something else"), "", "not a complete checkpoint"),
    (lambda path, corpus: torch.save({"model": {}}, path), "", "not a complete checkpoint"),
    (lambda path, corpus: torch.save({"model": print}, path), "", "not a complete checkpoint")])
def test_training_refuses_to_resume_what_does_not_fit(corpus, tmp_path, monkeypatch, capsys, spoil, flags, says):
    """And leaves it alone."""
    monkeypatch.chdir(tmp_path)
    run(corpus, tmp_path)
    if spoil:
        spoil(tmp_path / "checkpoint.pt", corpus)
    before = (tmp_path / "checkpoint.pt").read_bytes()
    with pytest.raises(SystemExit) as stop:
        resume(tmp_path, *flags.split())
    assert stop.value.code == 2 and re.search(says, capsys.readouterr().err)
    assert (tmp_path / "checkpoint.pt").read_bytes() == before and not (tmp_path / "intruded").exists()


def test_training_resumes_a_checkpoint_of_an_older_version_with_defaults(corpus, tmp_path):
    saved = run(corpus, tmp_path)
    for name in ("checkpoint_activations", "compile"):
        del saved["settings"][name]
    torch.save(saved, tmp_path / "checkpoint.pt")
    settings = resume(tmp_path, "--steps", "7")["settings"]
    assert settings["checkpoint_activations"] is settings["compile"] is False


def test_training_resumed_drops_the_metrics_after_its_checkpoint(corpus, tmp_path):
    """A kill between two checkpoints leaves lines of steps that will be done again, the last of them cut."""
    run(corpus, tmp_path / "whole", "--steps", "9")
    with mock.patch("train.learning_rate_at", lambda step, _, rate=train.learning_rate_at: rate(step, dict(
            learning_rate=1e-3, warmup_steps=2, steps=9))):  # as if it had been meant to do 9 steps
        run(corpus, tmp_path / "parts")
    with open(tmp_path / "parts" / "metrics.jsonl", "a") as metrics:
        metrics.write('{"step": 7, "loss": 0.0}\n{"step": 9, "val_loss": 0.0}\n{"step": 4, "loss": 1.0')
    resume(tmp_path / "parts", "--steps", "9")
    assert metrics_of(tmp_path / "parts") == metrics_of(tmp_path / "whole")


def test_training_in_the_folder_of_a_running_one_is_refused(corpus, tmp_path):
    before = run(corpus, tmp_path)
    refused = pytest.raises(SystemExit, match="another run is writing to .*name another --out")
    with train.alone_in(tmp_path), refused:
        run(corpus, tmp_path, "--seed", "1")
    assert same(checkpoint_of(tmp_path), before) and not (tmp_path / "checkpoint-1.pt").exists()
    run(corpus, tmp_path, "--seed", "1")  # the lock goes with the run


def test_training_goes_on_without_locks_where_there_are_none(corpus, tmp_path, monkeypatch, capsys):
    """As on Windows: no fcntl to import, and no opening of folders."""
    monkeypatch.setitem(sys.modules, "fcntl", None)
    monkeypatch.setattr(os, "open", mock.Mock(side_effect=PermissionError("a folder")))
    spec = importlib.util.spec_from_file_location("train_elsewhere", train.__file__)
    elsewhere = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "train_elsewhere", elsewhere)
    spec.loader.exec_module(elsewhere)
    elsewhere.main([*TINY, "--data", str(corpus), "--out", str(tmp_path), "--prompt", "a"])
    assert checkpoint_of(tmp_path)["step"] == 6
    assert f"no file locks: see to it that no second run writes to {tmp_path}" in capsys.readouterr().out


@pytest.mark.skipif(sys.platform != "linux" or "ATTEND" in os.environ, reason="needs a memory limit, and our way")
def test_training_out_of_memory_says_what_to_change(tmp_path):
    limited = f"""import resource, runpy, sys
resource.setrlimit(resource.RLIMIT_AS, (8 * 2**30, 8 * 2**30))
sys.argv[0] = "train.py"
runpy.run_path({train.__file__!r}, run_name="__main__")"""
    flags = "--device cpu --dtype float32 --attend mask --context-length 100000 --batch-size 1 --n-layer 1"
    command = [sys.executable, "-c", limited, *flags.split(), "--eval-rows", "1", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "out of memory" in done.stderr and all(flag in done.stderr for flag in (
        "--checkpoint-activations", "--batch-size", "--grad-accumulation", "--context-length"))


@pytest.mark.parametrize("flags, says", [
    ("--attention anker", "'anker': choose one of full"), ("--n-head 3", "n_embd 8 is not divisible"),
    ("--context-length 1", "expected at least 2"), ("--context-length 5000", "too few to fill one row of 5"),
    ("--data nowhere", "'nowhere' does not exist"), ("--dtype int8", "--dtype int8: expected float32"),
    ("--batch-size 0", "--batch-size 0: expected more than 0"), ("--val-fraction 2", "between 0 and 1"),
    ("--device tpu", "--device tpu: expected cpu, cuda, mps or xpu"), ("--device cpu:x", "cpu:x: expected"),
    ("--device cuda:99", "--device cuda:99: this PyTorch sees"), ("--seed -1", "--seed -1: expected 0"),
    ("--compile --checkpoint-activations", "--compile --checkpoint-activations: .*choose one"),
    ("--warmup-steps -5", "--warmup-steps -5: expected 0"), ("--resume --prompt a", "no .*pt to load")])
def test_training_errors_in_flags_come_before_anything_is_written(corpus, tmp_path, capsys, flags, says):
    out = tmp_path / "out"
    with pytest.raises(SystemExit) as stop:
        train.main([*TINY, "--data", str(corpus), "--out", str(out), *flags.split()])
    assert stop.value.code == 2 and not out.exists()
    assert re.search(says, capsys.readouterr().err)


def test_training_refuses_an_out_that_is_a_file(corpus, tmp_path, capsys):
    (tmp_path / "out").write_text("mine")
    with pytest.raises(SystemExit):
        run(corpus, tmp_path / "out")
    assert "File exists" in capsys.readouterr().err and (tmp_path / "out").read_text() == "mine"


@pytest.mark.parametrize("kind", ["cuda", "mps", "xpu"])
def test_training_takes_the_devices_that_pytorch_has(monkeypatch, kind):
    for name, n_devices in ((kind, 0), (f"{kind}:2", 2)):
        monkeypatch.setattr(torch.get_device_module(kind), "device_count", lambda: n_devices)
        with pytest.raises(ValueError, match=f"{name}: .* sees {n_devices} {kind.upper()} .*--device cpu"):
            train.check_device(name, 1)
    train.check_device(kind, 1)
    train.check_device(f"{kind}:1", 1)
    with pytest.raises(ValueError, match=f"--device {kind}:1: under torchrun expected cpu, or cuda"):
        train.check_device(f"{kind}:1", 2)


def test_training_defaults_are_those_of_a_cpu_or_of_cuda(monkeypatch):
    monkeypatch.setattr(train, "faster_dtype", lambda: "measured")
    for column, kind, dtype in ((0, "cpu", "measured"), (0, "mps", "float32"), (0, "xpu", "float32"),
                                (1, "cuda", "bfloat16")):
        table = {name: default[column] for name, default in train.SETTINGS.items()}
        assert train.default_settings(kind) == table | {"dtype": dtype}


@pytest.mark.parametrize("float32, bfloat16, faster", [
    ([2, 2, 2], [2, 2, 2], "bfloat16"),
    ([2, 2, 2], [9, 1, 9], "bfloat16"), ([9, 1, 9], [2, 2, 2], "float32")])
def test_training_measures_the_faster_dtype_of_a_cpu(monkeypatch, float32, bfloat16, faster):
    """By the best time of each, so one interruption does not decide."""
    times = {torch.float32: float32, torch.bfloat16: bfloat16}
    monkeypatch.setattr(train.timeit, "repeat", lambda product, **how: times[product().dtype])
    assert train.faster_dtype() == faster


def test_training_measures_the_dtype_once_and_keeps_it(corpus, tmp_path, monkeypatch):
    measured = ["bfloat16"]
    monkeypatch.setattr(train, "faster_dtype", measured.pop)
    flags = [f for f in TINY if f not in ("--dtype", "float32")]
    train.main([*flags, "--data", str(corpus), "--out", str(tmp_path), "--prompt", "a"])
    assert checkpoint_of(tmp_path)["settings"]["dtype"] == "bfloat16"
    monkeypatch.setattr(train, "faster_dtype", lambda: "float32")
    assert resume(tmp_path, "--steps", "7")["settings"]["dtype"] == "bfloat16"


def test_training_prompt_only_loads_and_samples(corpus, tmp_path, capsys):
    before = run(corpus, tmp_path)
    capsys.readouterr()
    resume(tmp_path, "--prompt", "docu")
    model = GPT(GPTConfig(n_layer=1, n_head=2, n_kv_head=1, n_embd=8, n_hidden=8, context_length=24))
    model.load_state_dict(before["model"])
    assert capsys.readouterr().out == train.sample(model, "docu", before["settings"]) + "\n"
    assert same(checkpoint_of(tmp_path), before)


def test_training_sample_ends_at_the_end_of_the_document(monkeypatch):
    model = tiny_model(vocab_size=258, dtype=torch.float32)
    monkeypatch.setattr(model, "generate", lambda tokens, *_, **__: torch.cat((tokens, torch.tensor([[66, EOS, 67]])), dim=1))
    assert train.sample(model, "A", {"seed": 0, "dtype": "float32"}) == "AB"


def test_training_reports_and_writes_metrics(corpus, tmp_path, capsys):
    run(corpus, tmp_path)
    printed = capsys.readouterr().out
    for said in ("anchor, by document", "4 rows, 96 tokens", "held out", "validation loss",
                 "loss by position", "continuing 'a'", "checkpoint.pt"):
        assert said in printed
    metrics = metrics_of(tmp_path)
    assert [m["step"] for m in metrics if "loss" in m] == [1, 2, 3, 4, 5, 6]
    assert [m["step"] for m in metrics if "val_loss" in m] == [3, 6]
    at_the_end = "\nvalidation loss {val_loss:.3f} nats a token, {bits_per_byte:.3f} bits a byte\n"
    assert at_the_end.format(**metrics[-1]) in printed
    means = [sum(m["loss"] for m in metrics if "loss" in m and a < m["step"] <= a + 3) / 3 for a in (0, 3)]
    for step, mean in zip((3, 6), means):
        assert f"step {step:>5}    train {mean:.3f}    validation" in printed


def test_training_that_is_at_its_end_already_only_shows_what_it_learned(corpus, tmp_path, capsys):
    before, metrics = run(corpus, tmp_path), metrics_of(tmp_path)
    shown = capsys.readouterr().out
    after = resume(tmp_path)
    again = capsys.readouterr().out
    assert again[again.index("\nvalidation loss"):again.index("\nsample")] in shown
    assert same(after, before) and metrics_of(tmp_path) == metrics


def test_training_learning_rate_warms_up_and_decays():
    schedule = dict(learning_rate=1.0, warmup_steps=4, steps=20)
    rates = [train.learning_rate_at(step, schedule) for step in range(20)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert all(a > b > 0.1 for a, b in zip(rates[4:], rates[5:]))
    assert train.learning_rate_at(12, schedule) == pytest.approx(0.55)  # half-way down
    assert train.learning_rate_at(20, schedule) == pytest.approx(0.1)


def test_training_counts_optimizer_steps_not_micro_batches(corpus, tmp_path):
    run(corpus, tmp_path, "--grad-accumulation", "4", "--learning-rate", "0.5")
    rates = [m["lr"] for m in metrics_of(tmp_path) if "lr" in m]
    assert rates == [train.learning_rate_at(s, dict(learning_rate=0.5, warmup_steps=2, steps=6)) for s in range(6)]


def uneven_batch():
    """Four rows with very different numbers of targets."""
    rows = PackedRows([(b"a\0" * 20)[:n] for n in (0, 0, 0, 0, 0, 0, 0, 1, 40, 3)], 12, seed=0)
    batch = rows.shuffled_batch(0, 4)
    counts = (batch[2] != NO_TARGET).sum(dim=1).tolist()
    assert max(counts) > 2 * min(counts)
    return batch


@pytest.mark.parametrize("n", [1, 2])
def test_training_accumulating_micro_batches_equals_one_batch(n):
    batch, results = uneven_batch(), []
    for size in (4, n):
        model = tiny_model(vocab_size=258)
        optimizer = train.make_optimizer(model, 0.1)
        micro = list(zip(*(x.split(size) for x in batch)))
        steps = [[x.item() for x in train.train_step(model, optimizer, micro, 1e-2, 1.0, "float32")] for _ in range(3)]
        results.append((torch.tensor(steps), *model.parameters()))
    for one, accumulated in zip(*results):
        assert_close(accumulated, one, 1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_sums_the_gradients_of_micro_batches_in_float32(dtype):
    """Whatever autocast computes each of them in. A sum in bfloat16 would lose most of its bits."""
    rows = PackedRows([bytes([97 + i % 7]) * (5 + i % 3) for i in range(400)], 12, seed=0)
    batch = rows.shuffled_batch(0, 64)
    n_targets = (batch[2] != NO_TARGET).sum()

    def gradient(model):
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    def error(got, expected):
        return ((got.double() - expected).norm() / expected.norm()).item()

    exact, in_bfloat16 = 0.0, 0.0
    for micro in zip(*(x.split(1) for x in batch)):
        model = tiny_model(vocab_size=258, dtype=torch.float32)
        with train.autocast(model, dtype):
            loss = model(*micro)[1]
        (loss * ((micro[2] != NO_TARGET).sum() / n_targets)).backward()
        exact = exact + gradient(model).double()
        in_bfloat16 = in_bfloat16 + gradient(model).bfloat16()
    model, summed = tiny_model(vocab_size=258, dtype=torch.float32), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer.register_step_pre_hook(lambda *_: summed.append(gradient(model)))
    micro_batches = list(zip(*(x.split(1) for x in batch)))
    loss, _ = train.train_step(model, optimizer, micro_batches, 0.0, math.inf, dtype)
    assert summed[0].dtype == loss.dtype == torch.float32
    assert error(summed[0], exact) < 1e-6 and error(in_bfloat16, exact) > 1e-3
    if dtype == "float32":
        model = tiny_model(vocab_size=258)
        mean = model(*batch)[1]
        mean.backward()
        assert error(summed[0], gradient(model)) < 1e-6
        assert loss.item() == pytest.approx(mean.item(), rel=1e-6)


def test_training_takes_the_same_rows_however_a_step_is_cut(corpus, tmp_path):
    one, *cuts = (run(corpus, tmp_path / n, "--batch-size", n, "--grad-accumulation", k)["model"] for n, k in ("41", "22", "14"))
    for cut in cuts:
        for name in one:
            assert_close(cut[name], one[name], 1e-5, name)


@pytest.mark.parametrize("one, other", [("checkpoint_activations", "compile"), ("compile", "checkpoint_activations")])
def test_training_flags_reach_what_they_name(corpus, tmp_path, monkeypatch, one, other):
    """A run with nothing at its default, watched from inside; only one of two that exclude each other."""
    calls = {name: [] for name in ("PackedRows", "make_optimizer", "train_step", "evaluate", "sample")}
    for name, seen in calls.items():
        original = getattr(train, name)
        monkeypatch.setattr(train, name, lambda *args, _seen=seen, _original=original, **kwargs: _seen.append(
            (*args, [p.detach().clone() for p in args[0].parameters()] if _seen is calls["make_optimizer"] else None))
            or _original(*args, **kwargs))
    flags = dict(attention="intra_doc", attend="mask", context_length=20, batch_size=3, grad_accumulation=2, steps=2,
                 learning_rate=0.01, warmup_steps=1, weight_decay=0.3, grad_clip=0.7, n_layer=2, n_head=8, n_kv_head=2,
                 n_embd=16, n_hidden=24, dtype="bfloat16", seed=5, eval_interval=1, eval_rows=1, val_fraction=0.25,
                 **{one: True, other: False})
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda f: compiled.append(f) or f)
    train.main(["--data", str(corpus), "--out", str(tmp_path), "--prompt", "b", "--device", "cpu"]
               + [x for name, value in flags.items() for x in ("--" + name.replace("_", "-"), str(value)) if x != "True"
                  and name != other])
    assert set(flags) | {"data"} == set(train.SETTINGS)
    assert all(value not in train.SETTINGS[name][:2] for name, value in flags.items() if name not in ("dtype", other))

    (model, weight_decay, start), = calls["make_optimizer"]
    assert weight_decay == 0.3 and (model in compiled) == flags["compile"]
    config = {name: value for name, value in flags.items() if name in dataclasses.asdict(model.config)}
    assert model.config == train.model_config(flags) == GPTConfig(vocab_size=258, **config)
    assert len(config) == 9
    torch.manual_seed(5)
    assert all(torch.equal(a, b) for a, b in zip(start, GPT(model.config).parameters(), strict=True))

    (train_documents, *for_train, _), (held_out, *for_val, _) = calls["PackedRows"]
    assert (train_documents, held_out) == split_documents(load_documents(corpus), 0.25, seed=0)
    assert for_train[0] == for_val[0] == 20 and for_train[1] == 5
    rows = PackedRows(train_documents, 20, 5)
    for step, (_, _, batches, learning_rate, grad_clip, dtype, _) in enumerate(calls["train_step"]):
        assert same(batches, [rows.shuffled_batch(6 * step, 3), rows.shuffled_batch(6 * step + 3, 3)])
        assert learning_rate == train.learning_rate_at(step, flags) and (grad_clip, dtype) == (0.7, "bfloat16")
    assert len(calls["train_step"]) == 2
    for _, batch, batch_size, dtype, _ in calls["evaluate"]:
        assert same(batch, PackedRows(held_out, 20, 0).shuffled_batch(0, 1)) and (batch_size, dtype) == (3, "bfloat16")
    assert len(calls["evaluate"]) == 2 and calls["sample"][0][1] == "b"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_computes_in_the_dtype_it_is_given(dtype):
    model, seen = tiny_model(vocab_size=258, dtype=torch.float32), []
    model.head.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    train.train_step(model, train.make_optimizer(model, 0.0), [uneven_batch()], 1e-2, 1.0, dtype)
    assert all(p.grad is None for p in model.parameters())
    train.evaluate(model, uneven_batch(), 4, dtype)
    train.sample(model, "a", {"seed": 0, "dtype": dtype}, max_new_tokens=1)
    assert seen == [getattr(torch, dtype)] * 3


def test_training_validates_on_the_same_rows_for_every_seed_and_kind(corpus, tmp_path, monkeypatch):
    batches = []
    evaluate = train.evaluate
    monkeypatch.setattr(train, "evaluate", lambda model, batch, *args: batches.append(batch) or evaluate(model, batch, *args))
    for i, flags in enumerate(("--seed 0", "--seed 1", "--attention full")):
        run(corpus, tmp_path / str(i), *flags.split())
    assert len(batches) == 6 and all(same(batch, batches[0]) for batch in batches)


def test_training_clips_and_decays_only_matrices():
    model = tiny_model(vocab_size=258)
    decay, no_decay = train.make_optimizer(model, 0.1).param_groups
    assert decay["weight_decay"] == 0.1 and all(p.ndim == 2 for p in decay["params"])
    assert decay["betas"] == no_decay["betas"] == (0.9, 0.95)
    assert no_decay["weight_decay"] == 0 and all(p.ndim == 1 for p in no_decay["params"])
    assert len(decay["params"]) + len(no_decay["params"]) == len(list(model.parameters()))
    before = [p.clone() for p in model.parameters()]
    train.train_step(model, train.make_optimizer(model, 0.0), [uneven_batch()], 1e-2, 1.0, "float32")
    assert all((p != b).any() for p, b in zip(model.parameters(), before))
    before = [p.clone() for p in model.parameters()]
    sgd = torch.optim.SGD(model.parameters(), lr=0.0)
    _, norm = train.train_step(model, sgd, [uneven_batch()], 1.0, 0.5, "float32")
    moved = torch.cat([(p - b).flatten() for p, b in zip(model.parameters(), before)]).norm().item()
    assert norm > 0.5 and moved == pytest.approx(0.5, rel=1e-3)


def test_training_evaluates_as_the_definition_says():
    """Nats: the mean over all targets, not over rows. Bits a byte: all the nats over the bytes; EOS is no byte."""
    model, batch = tiny_model(vocab_size=258, dtype=torch.float32), uneven_batch()
    with torch.no_grad():
        loss = model(*batch)[1].item()
    nats, bits = train.evaluate(model, batch, batch_size=3, dtype="float32")
    targets = batch[2][batch[2] != NO_TARGET]
    assert nats == pytest.approx(loss, rel=1e-5)
    assert bits == pytest.approx(loss * len(targets) / (targets != EOS).sum().item() / math.log(2), rel=1e-5)


@pytest.mark.parametrize("n_processes", [1, 3, 5])
def test_training_evaluation_is_shared_out(monkeypatch, n_processes):
    """Each row to one process, in float64 from row to row; of four rows and five processes, one has none."""
    model, batch = tiny_model(vocab_size=258, dtype=torch.float32), uneven_batch()
    alone, n_targets = train.evaluate(model, batch, 2, "float32"), (batch[2] != NO_TARGET).sum().item()
    seen, sums = [], []
    model.register_forward_pre_hook(lambda module, inputs: seen.extend(inputs[0].tolist()))
    monkeypatch.setattr(train, "sum_over_processes", lambda number: sums.append(number) or number)
    monkeypatch.setattr(train.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(train.dist, "get_world_size", lambda: n_processes)
    for rank in range(n_processes):
        monkeypatch.setattr(train.dist, "get_rank", lambda: rank)
        train.evaluate(model, batch, 2, "float32")
    assert sorted(seen) == sorted(batch[0].tolist())
    assert sum(sums) / n_targets == pytest.approx(alone[0], rel=1e-6)
    monkeypatch.setattr(train, "sum_over_processes", lambda number: sum(sums))
    assert train.evaluate(model, batch, 2, "float32") == pytest.approx(alone, rel=1e-6)  # each gets it


def test_training_sums_losses_in_float64(monkeypatch):
    """A float32 that is 2**25 does not change by adding 1."""
    model, batch = tiny_model(vocab_size=258), uneven_batch()
    losses = iter([torch.full((1, batch[0].shape[1]), x) for x in (2.0**25, 1.0, 1.0, 1.0)])
    monkeypatch.setattr(train, "token_losses", lambda *_: next(losses))
    n_targets, T = (batch[2] != NO_TARGET).sum().item(), batch[0].shape[1]
    assert train.evaluate(model, batch, 1, "float32")[0] == (2**25 + 3) * T / n_targets
    losses = iter([torch.full((1, 20), x) for x in [2.0**25] + [1.0] * 8])
    table = train.loss_by_position(model, [b"a" * 19] * 9, 20, "float32")
    assert [nats for _, _, nats in table] == pytest.approx([(2**25 + 8) / 9] * 2, rel=1e-12)


def test_training_loss_by_position_is_of_documents_that_fill_the_context():
    model = tiny_model(vocab_size=258, dtype=torch.float32)
    long = bytes(range(39)), bytes(range(50, 95))
    losses = []
    for document in long:
        tokens = torch.tensor([[BOS, *document[:39]]])
        losses.append(F.cross_entropy(model(tokens)[0][0, :-1], tokens[0, 1:], reduction="none"))
    for n, mean in ((1, losses[0]), (2, (losses[0] + losses[1]) / 2)):
        table = train.loss_by_position(model, [b"short", long[0], long[0][:38], long[1]], 40, "float32", max_documents=n)
        assert [(a, b) for a, b, _ in table] == [(0, 15), (16, 31), (32, 38)]
        assert [x for _, _, x in table] == pytest.approx([mean[a:b].mean().item() for a, b in ((0, 16), (16, 32), (32, 39))])
    assert train.loss_by_position(model, [b"short"], 40, "float32") == []


@every_kind
@pytest.mark.parametrize("attend", ["document", "mask"])
def test_training_with_checkpoint_activations_changes_no_bit(attention, attend):
    results = []
    for checkpoint_activations in (False, True):
        model = tiny_model(vocab_size=258, attention=attention, attend=attend, checkpoint_activations=checkpoint_activations)
        forwards = []
        model.blocks[0].attention.register_forward_hook(lambda *_: forwards.append(1))
        steps = [train.train_step(model, train.make_optimizer(model, 0.1), [uneven_batch()], 1e-2, 1.0, "float32") for _ in range(2)]
        assert len(forwards) == (4 if checkpoint_activations else 2)  # the backward computes each block again
        results.append({"steps": steps, "model": model.state_dict()})
    assert same(*results)


def test_training_reads_loss_and_norm_rarely(corpus, tmp_path, monkeypatch):
    """Reading a number waits for the device, so ten steps are queued in between."""
    events, item, step = [], torch.Tensor.item, train.train_step
    monkeypatch.setattr(torch.Tensor, "item", lambda self: events.append("read") or item(self))
    monkeypatch.setattr(train, "train_step", lambda *args: events.append("step") or step(*args))
    run(corpus, tmp_path, "--steps", "40", "--eval-interval", "40")
    assert [len(steps) for steps in re.findall("(?:s)+", "".join(e[0] for e in events))] == [10] * 4
    assert [m["step"] for m in metrics_of(tmp_path)] == [*range(1, 41), 40]


def compiled_without_a_compiler(monkeypatch, calls):
    """torch.compile traces as ever, but the graphs run as they are; calls of what it returns are counted."""
    compile_it = torch.compile

    def compiled(f):
        calls.append(None)
        module = compile_it(f, backend="eager")
        if isinstance(f, torch.nn.Module):
            module.register_forward_pre_hook(lambda module, inputs: calls.append(inputs[0].shape))
        return module
    monkeypatch.setattr(torch, "compile", compiled)


def test_training_compiled_takes_the_same_steps_and_leaves_the_same_checkpoint(corpus, tmp_path, monkeypatch):
    flags, calls = ("--attention", "full", "--steps", "3"), []
    plain = run(corpus, tmp_path / "plain", *flags)
    compiled_without_a_compiler(monkeypatch, calls)
    compiled = run(corpus, tmp_path / "compiled", *flags, "--compile")
    assert [shape for shape in calls if shape] == [(2, 24)] * 6  # three steps, no evaluation and no sample
    assert list(compiled["model"]) == list(plain["model"]) and compiled["settings"]["compile"] is True
    for name in plain["model"]:
        assert_close(compiled["model"][name], plain["model"][name], 1e-5, name)
    calls.clear()
    resumed = resume(tmp_path / "compiled", "--steps", "6", "--no-compile")
    assert not calls and resumed["settings"]["compile"] is False
    assert resume(tmp_path / "plain", "--steps", "6", "--compile")["settings"]["compile"] is True
    assert len([shape for shape in calls if shape]) == 6


def test_training_says_it_in_a_line_where_nothing_can_be_compiled(corpus, tmp_path, monkeypatch, capsys):
    def no_compiler(*_):
        raise RuntimeError("No working C++ compiler found\n\nSet TORCHDYNAMO_VERBOSE=1")
    monkeypatch.setattr(torch, "compile", lambda f: no_compiler)
    with pytest.raises(SystemExit) as stop:
        run(corpus, tmp_path / "out", "--compile")
    said = capsys.readouterr().err
    assert stop.value.code == 2 and not (tmp_path / "out").exists()
    assert re.search("--compile: .*No working C.. compiler.*: install a C.. compiler, or .*--no-compile", said)


@pytest.mark.parametrize("device, nccl, backend", [
    ("cpu", False, "gloo"), ("cpu", True, "gloo"), ("cuda:1", True, None), ("cuda:1", False, "gloo")])
def test_training_processes_talk_by_gloo_where_there_is_no_nccl(monkeypatch, device, nccl, backend):
    """None: PyTorch chooses NCCL for what is on a GPU and gloo for what is on the CPU."""
    chosen = []
    monkeypatch.setattr(train.dist, "init_process_group", chosen.append)
    monkeypatch.setattr(train.dist, "is_nccl_available", lambda: nccl)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(train, "DistributedDataParallel", lambda model: ("replica of", model))
    job = SimpleNamespace(model="model", settings={"compile": False}, n_processes=2, device=device)
    assert train.make_replica(job) == ("replica of", "model")
    assert chosen == ([backend] if device == "cpu" else [device, backend])


# Two processes of torchrun on the CPU. They are ours to the letter, so ATTEND does not reach them.
torchrun = pytest.mark.skipif("ATTEND" in os.environ, reason="the processes of torchrun have our attention")


def start_two(corpus, out, *flags, program=train.__file__):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command = [*torchrun, str(program), *TINY]
    return subprocess.Popen([*command, "--data", str(corpus), "--out", str(out), "--prompt", "a", *flags],
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


def wait_for_metrics(process, out, n=5):
    metrics = out / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and metrics.read_text().count("\n") > n):
        time.sleep(0.01)


@torchrun
def test_training_two_processes_equal_one_and_either_can_go_on(corpus, tmp_path):
    flags = ("--batch-size", "1", "--grad-accumulation", "4")
    process = start_two(corpus, tmp_path / "two", *flags)
    printed, errors = process.communicate()
    assert process.returncode == 0, errors
    assert printed.count("validation loss") == 1 and "2 x cpu" in printed and "4 rows, 96 tokens" in printed
    one, two = run(corpus, tmp_path / "one", *flags), checkpoint_of(tmp_path / "two")
    for name in one["model"]:
        assert_close(two["model"][name], one["model"][name], 1e-5, name)
    for a, b in zip(metrics_of(tmp_path / "one"), metrics_of(tmp_path / "two"), strict=True):
        assert a == pytest.approx(b, rel=1e-4)
    one, two = (resume(tmp_path / n, "--steps", "8", "--batch-size", "2", "--grad-accumulation", "2") for n in ("one", "two"))
    for name in one["model"]:
        assert_close(two["model"][name], one["model"][name], 1e-5, name)


@torchrun
def test_training_two_processes_compiled_equal_one(corpus, tmp_path):
    program = tmp_path / "compiled_without_a_compiler.py"
    program.write_text(f"""import functools, runpy, sys, torch
sys.path.insert(0, {str(Path(train.__file__).parent)!r})
torch.compile = functools.partial(torch.compile, backend="eager")
runpy.run_path({train.__file__!r}, run_name="__main__")
""")
    flags = ("--attention", "full", "--steps", "3")
    process = start_two(corpus, tmp_path / "two", *flags, "--compile", program=program)
    printed, errors = process.communicate(timeout=300)
    assert process.returncode == 0 and "2 x cpu, float32, compiled" in printed, errors
    one, two = run(corpus, tmp_path / "one", *flags)["model"], checkpoint_of(tmp_path / "two")["model"]
    assert list(one) == list(two)
    for name in one:
        assert_close(two[name], one[name], 1e-5, name)


@torchrun
def test_training_two_processes_stop_together_when_asked(corpus, tmp_path):
    process = start_two(corpus, tmp_path / "two", "--steps", "100000", "--eval-interval", "100000")
    wait_for_metrics(process, tmp_path / "two", 20)
    process.terminate()
    printed, errors = process.communicate(timeout=120)
    step = checkpoint_of(tmp_path / "two")["step"]
    assert step >= 20 and f"stopped after step {step} of 100000" in printed, errors
    assert [m["step"] for m in metrics_of(tmp_path / "two")] == list(range(1, step + 1))


@torchrun
def test_training_ends_when_one_of_two_processes_dies(corpus, tmp_path):
    process = start_two(corpus, tmp_path / "two", "--steps", "100000", "--eval-interval", "100000")
    wait_for_metrics(process, tmp_path / "two")
    children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
    os.kill(int(children[-1]), signal.SIGKILL)
    _, errors = process.communicate(timeout=120)
    assert process.returncode and "SIGKILL" in errors


@torchrun
def test_training_processes_must_share_out_the_micro_batches(corpus, tmp_path):
    process = start_two(corpus, tmp_path / "two", "--grad-accumulation", "3")
    printed, errors = process.communicate(timeout=120)
    assert process.returncode and "--grad-accumulation 3: expected a multiple of the 2 processes" in errors and not printed


@every_kind
def test_training_can_learn_a_tiny_corpus_by_heart(attention):
    torch.manual_seed(0)
    rows = PackedRows([b"the quick brown fox", b"jumps over", b"a lazy dog and runs away!!!"], 59, seed=0)
    batch = rows.shuffled_batch(0, 1)
    model = GPT(GPTConfig(context_length=59, n_layer=2, n_head=2, n_kv_head=1, n_embd=32, n_hidden=64, attention=attention))
    optimizer = train.make_optimizer(model, 0.0)
    for _ in range(150):
        loss, _ = train.train_step(model, optimizer, [batch], 1e-2, 1.0, "float32")
    assert loss < 0.02


# ----------------------------------------------------------------------------------------------------------------
# Bench: a benchmark that measures the wrong thing is worse than none


@given(st.integers(2, 300), st.sampled_from([3, 30, 600]), seeds)
def test_bench_rows_are_packed_to_the_end(context_length, mean_length, seed):
    doc_ids = bench.log_normal_doc_ids(context_length, mean_length, seed)
    assert doc_ids.shape == (1, context_length) and doc_ids.dtype == torch.int64
    assert set(doc_ids.diff().tolist()[0]) <= {0, 1} and doc_ids[0, :2].tolist() == [0, 1]


def test_bench_document_lengths_have_the_mean_they_name():
    for mean_length in (30, 600):
        n_documents = int(bench.log_normal_doc_ids(2**20, mean_length, 0).max())
        assert 2**20 / n_documents == pytest.approx(mean_length, rel=0.1)


def speed_rows(tmp_path, *flags):
    bench.main(["speed", "--context-lengths", "65", "--mean-lengths", "8", "--no-memory", "--device", "cpu",
                "--json", str(tmp_path / "x.json"), *flags])
    return json.loads((tmp_path / "x.json").read_text())["speed"]


DTYPE = train.default_settings("cpu")["dtype"]
OTHER_DTYPE = "anchor, float32" if DTYPE == "bfloat16" else "anchor, bfloat16"


def test_bench_speed_table_counts_pairs_and_takes_ratios_in_one_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))  # the real one takes minutes
    limits = {"float32": 3e9, "bfloat16": 2e9}
    monkeypatch.setattr(bench, "limit", lambda dtype, device: limits[dtype])
    rows = speed_rows(tmp_path, "--repeats", "2", "--dtype", "float32")
    doc_ids = bench.log_normal_doc_ids(65, 8, 0)
    assert [r["case"] for r in rows] == [
        "full", "intra_doc", "anchor", "anchor by mask", "full", "intra_doc", "anchor", "anchor, checkpointed",
        OTHER_DTYPE, "plain GPT", "full, compiled", "anchor, compiled", "plain GPT, compiled"]
    full = {r["kind"]: r["seconds"] for r in rows if r["case"] == "full"}
    for r in rows:
        kind = "full" if "plain" in r["case"] else r["case"].split(" ")[0].strip(",")
        pairs = expected_mask(doc_ids, kind).sum().item()
        assert r["visible"] == pytest.approx(pairs / (65 * 66 / 2))
        assert r["times_faster"] == pytest.approx(full[r["kind"]] / r["seconds"])
        assert r["cost_per_visible_pair"] == pytest.approx(r["seconds"] / full[r["kind"]] / r["visible"])
        assert r["tokens_per_second"] == pytest.approx(65 / r["seconds"])
        if r["kind"] == "attention":
            flops, dtype = 3.5 * 4 * pairs * 6 * 64, "float32"
        else:  # 4 layers of 4 heads of 64: qkv and proj, two or three matrices of the MLP; the head
            layer = 4 * 256**2 + (8 * 256**2 if "plain" in r["case"] else 3 * 256 * 688)
            flops = 6 * 65 * (4 * layer + 258 * 256) + 3.5 * 4 * pairs * 4 * 256
            dtype = r["case"].split(" ")[1] if r["case"] == OTHER_DTYPE else DTYPE
        assert r["share_of_limit"] == pytest.approx(flops / r["seconds"] / limits[dtype])
    assert "tokens/s" in capsys.readouterr().out


@given(st.integers(2, 40), st.sampled_from([1, 3, 30]), seeds)
def test_bench_varlen_row_is_anchor_attention(context_length, mean_length, seed):
    def kernel(q, k, v, starts_q, starts_k, longest_q, longest_k, window_size):  # stands in for the one that only CUDA has
        assert window_size == (-1, 0) and starts_q.dtype == torch.int32
        lengths = starts_q.diff().tolist()
        assert starts_q.equal(starts_k) and starts_q[0] == 0 and longest_q == longest_k == max(lengths)
        pieces = zip(*(x.transpose(0, 1)[None].split(lengths, dim=2) for x in (q, k, v)))
        return torch.cat([F.scaled_dot_product_attention(*piece, is_causal=True) for piece in pieces], dim=2)[0].transpose(0, 1)
    doc_ids = bench.log_normal_doc_ids(context_length, mean_length, seed)
    q, k, v = torch.randn(3, 1, 2, context_length, 4, generator=torch.Generator().manual_seed(0))
    with mock.patch.dict(sys.modules, {"torch.nn.attention.varlen": mock.Mock(varlen_attn=kernel)}):
        assert_close(bench.prepare_varlen(doc_ids, "anchor", "cpu")(q, k, v), attend_by_mask(q, k, v, doc_ids, "anchor"), 1e-5)


@pytest.mark.parametrize("slow", [False, True])
def test_bench_speed_leaves_out_what_is_too_long_or_too_slow_or_not_wanted(tmp_path, monkeypatch, slow):
    limits = {DTYPE: 1e12, OTHER_DTYPE.split(" ")[1]: 1e10 if slow else 1e11}
    monkeypatch.setattr(bench, "limit", lambda dtype, device: limits[dtype])
    rows = speed_rows(tmp_path, "--repeats", "1", "--full-up-to", "64", "--mask-up-to", "64", "--no-compile")
    assert [r["case"] for r in rows] == ["intra_doc", "anchor", "intra_doc", "anchor", "anchor, checkpointed",
                                         *([] if slow else [OTHER_DTYPE])]
    assert all(r["times_faster"] is r["cost_per_visible_pair"] is None for r in rows)


def test_bench_step_in_the_other_dtype_is_in_that_dtype(monkeypatch):
    dtypes = []
    monkeypatch.setattr(train, "train_step", lambda *args: dtypes.append(args[-1]))
    for name in ("anchor", "anchor, float32", "anchor, bfloat16"):
        bench.step_run(bench.make_step(name, 16, "cpu"), bench.log_normal_doc_ids(16, 8, 0), "cpu")
    assert dtypes == [DTYPE, "float32", "bfloat16"]


@pytest.mark.parametrize("name", ["anchor", "plain GPT", "anchor, checkpointed"])
def test_bench_counts_the_matrix_products_that_pytorch_counts(name):
    model = bench.make_step(name, 33, "cpu")[0]
    tokens, doc_ids = torch.randint(256, (1, 33)), bench.log_normal_doc_ids(33, 8, 0)
    with FlopCounterMode(display=False) as forward, torch.no_grad():
        model(tokens, doc_ids, tokens)
    with FlopCounterMode(display=False) as counter:
        model(tokens, doc_ids, tokens)[1].backward()
    once, counted = forward.get_total_flops(), counter.get_total_flops()  # a CPU's attention is not in them
    assert bench.matrix_flops(model, 33) == 3 * once
    if "checkpointed" in name:  # what is computed again is no part of what has to be
        assert counted > 3 * once
    else:
        assert counted == 3 * once


def test_bench_counts_the_attention_that_pytorch_counts():
    """In full attention, spelled out: PyTorch counts the hidden pairs, too. Fused backwards have 5 products for 2."""
    doc_ids = torch.tensor([[0] + [1] * 63])
    q, k, v = torch.randn(3, 1, 3, 64, 8)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        F.scaled_dot_product_attention(q, k, v, is_causal=True)
    forward = counter.get_total_flops() * (64 * 65 / 2) / 64**2
    assert bench.attention_flops(doc_ids, "full", 3 * 8, backward=False) == forward > 0
    assert bench.attention_flops(doc_ids, "full", 3 * 8) == 3.5 * forward


def test_bench_limit_is_of_a_large_product_unless_that_takes_minutes(monkeypatch, capsys):
    sizes = []
    for slow in (False, True):
        clock = iter([0.0, 1.0 if slow else 1e-3] * 8)
        monkeypatch.setattr(bench, "now", lambda device: next(clock))
        monkeypatch.setattr(torch, "mm", lambda a, b: sizes.append((a.shape[0], a.dtype)))
        n = 256 if slow else 2048
        assert bench.limit.__wrapped__("bfloat16", "cpu") == 2 * n**3 / (1.0 if slow else 1e-3)
        assert set(sizes) == {(256, torch.bfloat16)} | {(n, torch.bfloat16)}
        sizes.clear()
    assert "2,048 x 2,048 in bfloat16" in capsys.readouterr().out


def test_bench_profile_puts_every_operation_into_one_group():
    model, tokens = tiny_model(dtype=torch.float32), torch.randint(13, (1, 16))
    optimizer = train.make_optimizer(model, 0.1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        batch = (tokens, bench.log_normal_doc_ids(16, 5, 0), tokens)
        train.train_step(model, optimizer, [batch], 1e-3, 1.0, "bfloat16")
    events = profiler.key_averages()
    own = {event.key: event.self_cpu_time_total / 1e3 for event in events}
    times = bench.time_by_group(events, "cpu")
    assert list(times) == list(bench.GROUPS) and sum(times.values()) == pytest.approx(sum(own.values()))
    kernel = "aten::_scaled_dot_product_flash_attention_for_cpu"
    for group, operation in (("attention, forward", kernel), ("attention, backward", kernel + "_backward"),
                             ("matrix products", "aten::mm"), ("optimizer", "aten::_fused_adamw_"),
                             ("optimizer", "aten::linalg_vector_norm"), ("copies and casts", "aten::cat"),
                             ("copies and casts", "aten::copy_"), ("elementwise and norms", "aten::silu_backward"),
                             ("elementwise and norms", "aten::mul"), ("everything else", "aten::view")):
        alone = bench.time_by_group([event for event in events if event.key == operation], "cpu")
        assert own[operation] > 0 and alone[group] == sum(alone.values()) == own[operation]
    fused = mock.Mock(key="## Call CompiledFxGraph f7ed ##", self_cpu_time_total=2e3)
    assert bench.time_by_group([fused], "cpu")["fused by the compiler"] == 2.0


def test_bench_profile_table_sums_to_the_whole(tmp_path, capsys):
    bench.main(["profile", "--context-lengths", "33", "65", "--repeats", "1", "--no-compile", "--device", "cpu",
                "--json", str(tmp_path / "x.json")])
    columns = json.loads((tmp_path / "x.json").read_text())["profile"]
    assert list(columns) == ["33 eager", "65 eager"]
    assert all(list(groups) == list(bench.GROUPS) for groups in columns.values())
    whole = re.search(r"whole +([\d.,]+) ms", capsys.readouterr().out)[1].replace(",", "")
    assert float(whole) == pytest.approx(sum(columns["33 eager"].values()), abs=0.1)


def test_bench_yardstick_is_a_causal_model_of_our_size():
    ours, plain = (bench.make_step(case, 16, "cpu")[0] for case in ("full", "plain GPT"))
    count = lambda model: sum(p.numel() for p in model.parameters() if p.ndim == 2) - model.embedding.weight.numel()
    assert count(plain) - 16 * 256 == pytest.approx(count(ours), rel=0.01)
    tokens = torch.randint(256, (1, 16), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[0, 9] += 1
    difference = (plain(tokens, None, tokens)[0] != plain(changed, None, tokens)[0]).any(dim=-1)[0]
    assert not difference[:9].any() and difference[9:].all()


def test_bench_peak_memory_is_the_cases_own():
    doc_ids = bench.log_normal_doc_ids(4096, 100, 0)
    by_document, by_mask = (bench.peak_memory("attention", case, doc_ids, "cpu", "float32")
                            for case in ("anchor", "anchor by mask"))
    assert by_mask - by_document > 4096**2 / 2**20  # the mask alone has a byte a pair


def test_bench_change_by_shift_is_the_papers_difference():
    q, k = torch.randn(2, 3, 20, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logits, changed, mass = bench.change_by_shift(q, k, 1000, "float64")
    assert logits < 1e-12 and changed.sum() < 1e-10 and mass.sum().item() == pytest.approx(3 * 20)
    logits, changed, _ = bench.change_by_shift(q, k, 16, "bfloat16 tables, too (the paper)")
    def weights(shift):
        tables = rope_cos_sin(torch.arange(20)[None] + shift, 8, dtype=torch.bfloat16)
        turned_q, turned_k = (apply_rope(x[None].bfloat16(), *tables)[0].double() for x in (q, k))
        return [[(turned_k[h, :i + 1] @ turned_q[h, i] / math.sqrt(8)).softmax(dim=0) for i in range(20)] for h in range(3)]
    by_hand = torch.zeros(20, dtype=torch.float64)
    for before, after in zip(weights(0), weights(16)):
        for i in range(20):
            by_hand[:i + 1] += (before[i] - after[i]).abs()
    assert_close(changed, by_hand, 1e-12)
    assert 1e-4 < logits < 1e-1


def test_bench_rotation_kept_in_float32_is_float32s_whatever_q_and_k_were_rounded_to():
    q, k = torch.randn(2, 3, 64, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    names = ("float32 throughout", "bfloat16 in, float32 out (short documents on a CPU)", "bfloat16 q and k")
    ours, kept, rounded = (bench.change_by_shift(q, k, 16, name)[1].sum().item() for name in names)
    assert 0.5 < kept / ours < 2 and rounded > 1000 * kept


@pytest.mark.parametrize("n_kv_head", [1, 2, 4])
def test_bench_q_and_k_of_a_checkpoint_are_those_that_the_model_rotates(tmp_path, monkeypatch, n_kv_head):
    sizes = dict(context_length=32, n_layer=2, n_head=4, n_kv_head=n_kv_head, n_embd=32, n_hidden=8)
    model = tiny_model(vocab_size=258, dtype=torch.float32, **sizes)
    torch.save({"model": model.state_dict(), "optimizer": {}, "step": 0, "corpus": {},
                "settings": sizes | {"val_fraction": 0.5}}, tmp_path / "checkpoint.pt")
    lines = [json.dumps({"text": text * 30}) for text in ("abc", "xyz")]  # one of them is held out
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    rotated = []
    monkeypatch.setattr(anchor_gpt, "apply_rope", lambda x, *rest: rotated.append(x) or apply_rope(x, *rest))
    layers = bench.model_qk(tmp_path / "checkpoint.pt", 32, tmp_path / "text.jsonl")
    assert len(layers) == len(rotated) == 2
    for (q, k), x in zip(layers, rotated):
        assert q.shape == k.shape == (4, 32, 8) and torch.equal(q, x[0, :4].double())
        for head in range(4):
            assert torch.equal(k[head], x[0, 4 + head * n_kv_head // 4].double())


@pytest.mark.parametrize("copies_of", [bench.again_and_again, bench.from_one_expand])
@given(doc_ids=packings(max_rows=1), seed=seeds)
def test_bench_attention_with_copies_of_either_kind_is_anchor_attention(copies_of, doc_ids, seed):
    q, k, v = random_qkv(doc_ids, seed, 2, 2)
    attend = lambda q, k, v, doc_ids, _: bench.attend_with_copies(copies_of, q, k, v, document_lengths(doc_ids)[0])
    got = outputs_and_gradients(attend, q, k, v, doc_ids, "anchor")
    for a, b in zip(got, outputs_and_gradients(attend_by_mask, q, k, v, doc_ids, "anchor")):
        assert_close(a, b, 1e-12)


def test_bench_the_anchors_gradient_loses_its_bits_where_it_is_added_up_again_and_again():
    errors = {documents: dict(row) for documents, row in bench.error_of_the_anchors_gradient().items()}
    few, many = errors["16 of 8 tokens"], errors["512 of 8 tokens"]
    assert many["the anchor again and again"] > 3 * few["the anchor again and again"]
    for way in ("by mask", "copies from one expand", "by document, on this device"):
        assert many[way] < 0.01 and many["the anchor again and again"] > 3 * many[way]


def test_bench_kinds_start_from_the_same_weights_on_the_same_batches():
    config = GPTConfig(vocab_size=258, n_layer=1, n_head=1, n_kv_head=1, n_embd=8, n_hidden=8)
    one_document = PackedRows([b"abcdefgh" * 4], 16, 0)
    runs = bench.train_side_by_side(config, lambda step: one_document.shuffled_batch(step, 1), 8, 0, lambda model: model.norm.weight.sum()
                                    .item(), "float32")
    assert list(runs) == list(ATTENTIONS)
    histories = {a: [(step, report) for step, _, report in history] for a, (history, _) in runs.items()}
    assert [step for step, _ in histories["full"]] == list(range(9))
    assert_close(torch.tensor(histories["full"]), torch.tensor(histories["anchor"]), 1e-5)
    assert histories["full"] != histories["intra_doc"]


def test_bench_kinds_continue_from_the_weights_they_are_given():
    config = GPTConfig(vocab_size=258, n_layer=1, n_head=1, n_kv_head=1, n_embd=8, n_hidden=8)
    base, rows = GPT(config), PackedRows([b"abcdefgh" * 4], 16, 0)
    runs = bench.train_side_by_side(config, lambda step: rows.shuffled_batch(step, 1), 8, 0, lambda model: model.embedding.weight.sum()
                                    .item(), "float32", weights=base.state_dict())
    assert all(history[0] == (0, 0.0, base.embedding.weight.sum().item()) for history, _ in runs.values())
    assert all(history[-1][2] != history[0][2] for history, _ in runs.values())


def test_bench_compares_at_equal_time():
    assert bench.at_time([(1, 10.0, 4.0), (2, 20.0, 2.0)], 15.0) == 3.0


@given(st.integers(1, 8), st.integers(0, 60), seeds, st.sampled_from([None, 0.0, 0.3, 1.0]))
def test_bench_recall_documents_hold_each_fact_once_and_ask_for_one(n_facts, n_filler, seed, depth):
    document = data.recall_document(6 * n_facts + 6 + n_filler, n_facts, seed, depth)
    facts = re.findall(rb"<([A-Z][A-Z])=(\d)>", document)
    (key, value), = re.findall(rb"<([A-Z][A-Z])\?(\d)>$", document)
    assert len(document) == 6 * n_facts + 6 + n_filler and len(dict(facts)) == len(facts) == n_facts
    assert dict(facts)[key] == value == document[-2:-1]
    if depth is not None:
        before = document[:document.index(b"<%s=" % key)]
        assert len(re.sub(rb"<....>", b"", before)) == round(depth * n_filler)


def test_bench_recall_asks_for_any_of_the_facts():
    documents = [data.recall_document(200, 3, seed) for seed in range(100)]
    order = Counter([key for key, _ in re.findall(rb"<([A-Z][A-Z])=(\d)>", d)].index(d[-5:-3]) for d in documents)
    assert set(order) == {0, 1, 2} and min(order.values()) > 15


@pytest.mark.parametrize("make", [lambda: data.recall_document(11, 1, 0), lambda: data.recall_document(10**5, 677, 0),
                                  lambda: data.recall_document(100, 0, 0)])
def test_bench_recall_documents_that_cannot_be(make):
    with pytest.raises(ValueError, match="1 to 676 facts, and 6 bytes for each and the question"):
        make()


@pytest.mark.parametrize("whole", [True, False])
@given(seed=seeds, n_facts=st.integers(1, 3))
def test_bench_recall_rows_have_the_answers_as_only_targets(whole, seed, n_facts):
    tokens, doc_ids, targets = data.recall_batch(160, 2, n_facts, seed, packed=not whole)
    document_lengths(doc_ids)  # packed as a row should be
    for row, ids, goals in zip(tokens.tolist(), doc_ids, targets.tolist()):
        assert row[0] == BOS and (not whole or ids.max() == 1)
        wanted = [t for t in range(159) if goals[t] != NO_TARGET]
        assert len(wanted) == ids.max() and goals[-1] == NO_TARGET
        assert all(goals[t] == row[t + 1] and row[t] == ord("?") and chr(row[t + 1]).isdigit() for t in wanted)


def test_bench_recall_rows_have_long_documents_anywhere():
    firsts = [document_lengths(data.recall_batch(400, 1, 1, seed)[1])[0][1:] for seed in range(60)]
    longest_first = sum(lengths[0] == max(lengths) for lengths in firsts if len(lengths) > 1)
    assert 10 < longest_first < 45


def test_bench_recall_rate_is_the_share_of_right_answers(monkeypatch):
    """Held against a model that always says 7."""
    seven = lambda tokens, doc_ids: (F.one_hot(torch.full_like(tokens, ord("7")), 258).float(), None)
    monkeypatch.setattr(train, "autocast", lambda *_: torch.autocast("cpu", enabled=False))
    rate = bench.recall_rate(seven, 64, None, 2, "float32", n_documents=64)
    rows = [data.recall_batch(64, 8, 2, (7, 64, i), None, packed=False)[0] for i in range(0, 64, 8)]
    assert rate == (torch.cat(rows)[:, -2] == ord("7")).double().mean().item() and 0 < rate < 0.3


# ----------------------------------------------------------------------------------------------------------------
# Home: the README's code for other people's models, run as it stands there. Needs transformers, which is no requirement


def code_of_readme(containing):
    blocks = re.findall(r"```python\n(.*?)```", (Path(__file__).parent / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    (block,) = [b for b in blocks if containing in b]
    return block


def test_home_the_readme_shows_the_code_at_the_heart_as_it_is():
    source = iter([line.strip() for line in inspect.getsource(anchor_gpt.causal_blocks).splitlines()])
    for line in code_of_readme("copies = anchor.expand").splitlines():
        assert line.split("  #")[0].strip() in (x.split("  #")[0].strip() for x in source), line


def test_home_the_readmes_broken_promise_prints_what_it_says(capsys):
    block = code_of_readme("[7, 3]")
    exec(block, {})
    printed = capsys.readouterr().out.split()
    readme = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
    claimed = readme[readme.index(block) + len(block):].split("```")[2].split()
    assert printed[::3] == claimed[::3] and printed[1::3] == claimed[1::3] and len(claimed) == 30
    assert list(map(float, printed[2::3])) == pytest.approx(list(map(float, claimed[2::3])), abs=3e-6)


def test_home_the_readmes_batch_for_a_stream_of_documents():
    stream = torch.tensor([5, 6, 99, 7, 99, 99, 8, 9, 10, 99] * 3)
    home = {"torch": torch, "F": F, "stream": stream, "block_size": 9, "batch_size": 40, "separator": 99,
            "doc_ids_from_separators": anchor_gpt.doc_ids_from_separators}
    torch.manual_seed(0)
    exec(code_of_readme("starts = torch.randint"), home)
    for start, x, y, doc_ids in zip(home["starts"].tolist(), home["x"].tolist(), home["y"].tolist(), home["doc_ids"].tolist()):
        assert x == [99] + stream[start:start + 8].tolist() and doc_ids[:2] == [0, 1]
        for t in range(1, 9):
            assert y[t] == (-1 if x[t] == 99 else stream[start + t])
            assert t == 8 or doc_ids[t + 1] - doc_ids[t] == (x[t] == 99)
        assert y[0] == stream[start]


def pretrained(name, folder, **options):
    """A tiny random model of one of transformers' architectures, saved with a tokenizer of bytes -> folder."""
    transformers = pytest.importorskip("transformers", reason="pip install transformers to test the README's code for it")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(["<s>", "</s>", *alphabet])}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    sizes = dict(vocab_size=258, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.3, pad_token_id=0)
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**sizes | options)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


LLAMAS = pytest.mark.parametrize("name, options", [("Llama", {}), ("Mistral", {"sliding_window": None}),
                                                   ("Mistral", {"sliding_window": 64}), ("Qwen2", {})])


def run_the_readmes_training(folder, monkeypatch, *further_blocks):
    """README's code for transformers on a tiny model -> its names, and the gradients of each optimizer step."""
    monkeypatch.chdir(Path(folder).parent)
    home = {"name": folder, "texts": [f"text {i} " * (i % 4) for i in range(20)], "context_length": 64}
    block = code_of_readme("model = anchor_attention(AutoModelForCausalLM")
    for line in ("name = ", "texts = ", "context_length = "):  # what the reader fills in
        assert f"\n{line}" in block
        block = re.sub(rf"(?m)^{line}.*\n", "", block)
    if further_blocks:
        block = block[:block.index("optimizer = ")]
    gradients = []
    # The weights stay as they are, and gradients are not clipped: then each can be held against the dense mask's.
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self, *_, **__: gradients.append(
        [p.grad.clone() for group in self.param_groups for p in group["params"]]))
    flags = "remove_unused_columns=False"
    for code in (block, *map(code_of_readme, further_blocks)):
        exec(code.replace(flags, f"{flags}, max_grad_norm=1e9, bf16=False, use_cpu=True"), home)
    return home, gradients


def assert_each_is_one_of(gradients, expected):
    """In any order of the rows, and of the parameters, which Trainer groups in its own way."""
    def norms(gradient):
        return torch.tensor(sorted(g.double().norm().item() for g in gradient))
    expected = [norms(gradient) for gradient in expected]
    for got in map(norms, gradients):
        errors = [((got - right).abs().max() / right.max()).item() for right in expected]
        assert min(errors) < 1e-4, errors
        expected.pop(errors.index(min(errors)))


def dense_gradients(folder, tokens):
    """The gradient of the README's loss for a row of tokens, computed by transformers alone with a dense mask."""
    from transformers import AutoModelForCausalLM
    dense = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")  # none of ours in it
    doc_ids = [0, 1]
    for token in tokens[1:-1].tolist():
        doc_ids.append(doc_ids[-1] + (token == 1))
    doc_ids = torch.tensor([doc_ids])
    targets = [int(tokens[t + 1]) if t + 1 < 64 and (t == 0 or doc_ids[0, t] == doc_ids[0, t + 1]) else -100
               for t in range(64)]
    logits = dense(tokens[None], attention_mask=expected_mask(doc_ids, "anchor")[:, None],
                   position_ids=torch.arange(64)[None]).logits
    loss = F.cross_entropy(logits[0], torch.tensor(targets))
    return torch.autograd.grad(loss, list(dense.parameters()))


@LLAMAS
def test_home_the_readmes_loop_trains_as_the_dense_mask_does(tmp_path, monkeypatch, name, options):
    folder = pretrained(name, tmp_path / "model", **options)
    home, gradients = run_the_readmes_training(folder, monkeypatch)
    assert len(home["rows"]) == len(gradients) == 3
    assert_each_is_one_of(gradients, [dense_gradients(folder, row["input_ids"]) for row in home["rows"]])
    assert (tmp_path / "out-home" / "config.json").exists()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("needs, block", [("accelerate", "from transformers import Trainer, TrainingArguments"),
                                          ("trl", "from trl import")])
def test_home_the_readmes_trainers_train_as_the_dense_mask_does(tmp_path, monkeypatch, needs, block):
    pytest.importorskip(needs)
    folder = pretrained("Llama", tmp_path / "model")
    home, gradients = run_the_readmes_training(folder, monkeypatch, block)
    assert len(gradients) == 3
    assert_each_is_one_of(gradients, [dense_gradients(folder, row["input_ids"]) for row in home["rows"]])


@pytest.mark.filterwarnings("ignore")
def test_home_the_readmes_adapters_train_and_load(tmp_path, monkeypatch):
    pytest.importorskip("peft")
    folder = pretrained("Llama", tmp_path / "model")
    home, gradients = run_the_readmes_training(folder, monkeypatch, "from transformers import Trainer, TrainingArguments",
                                               "from peft import")
    doc_ids, tokens = torch.tensor([[0, 1, 1, 1, 2, 2]]), torch.arange(6)[None]
    loaded = home["model"].eval()(tokens, doc_ids=doc_ids).logits
    fresh, _ = given_anchor_attention("Llama", tmp_path / "fresh")
    assert_close(loaded, fresh(tokens, doc_ids=doc_ids).logits, 1e-5)  # adapters that never learned change nothing
    assert len(gradients) == 6 and len(gradients[-1]) == 2 * 2 * 2  # two matrices of two projections of two layers


def given_anchor_attention(name, folder, dtype=torch.float32, **options):
    folder = pretrained(name, folder, **options)
    from transformers import AutoModelForCausalLM
    return anchor_gpt.anchor_attention(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)), folder


SERVED = [("Llama", {}), ("Mistral", {"sliding_window": None}), ("Mistral", {"sliding_window": 64}), ("Qwen2", {}),
          ("Qwen3", {"head_dim": 8}), ("Qwen3Moe", {"head_dim": 8}), ("Mixtral", {}), ("Phi3", {}), ("GPTNeoX", {}),
          ("Olmo2", {}), ("SmolLM3", {}), ("Gemma", {"head_dim": 8}), ("Granite", {"attention_multiplier": 0.3}),
          ("Cohere", {}), ("Qwen2Moe", {"sliding_window": 0}), ("JetMoe", {"kv_channels": 8}), ("DeepseekV3", {
              "num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4,
              "qk_nope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 2})]
FLOAT32_ALONE = ("Qwen3Moe", "Mixtral", "Qwen2Moe")  # their experts have no float64


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name, options", SERVED, ids=[name for name, _ in SERVED])
def test_home_logits_and_gradients_are_the_dense_masks(tmp_path, name, options, checkpointing):
    dtype, bound = (torch.float32, 1e-4) if name in FLOAT32_ALONE else (torch.float64, 1e-9)
    model, folder = given_anchor_attention(name, tmp_path, dtype, **options)
    from transformers import AutoModelForCausalLM
    doc_ids = torch.tensor([[0, 1, 1, 1, 2, 2, 3, 3, 3, 3], [0, 1, 2, 2, 2, 2, 2, 2, 2, 2]])
    tokens = torch.randint(258, doc_ids.shape, generator=torch.Generator().manual_seed(0))
    dense = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa", dtype=dtype)
    results = []
    for m, options in ((model, {"doc_ids": doc_ids}), (dense, {
            "attention_mask": expected_mask(doc_ids, "anchor")[:, None], "position_ids": torch.arange(10).expand(2, -1)})):
        m.train()
        if checkpointing and m.supports_gradient_checkpointing:
            m.gradient_checkpointing_enable()
        logits = m(tokens, use_cache=False, **options).logits
        results.append((logits, *torch.autograd.grad(logits.square().sum(), list(m.parameters()), allow_unused=True)))
    for got, expected in zip(*results, strict=True):
        if expected is not None:  # of an expert that no token went to
            assert_close(got, expected, bound * max(1.0, expected.abs().max().item()))


# Which of these it is differs from one version of transformers to the next.
OUT_OF_REACH = "(AttentionInterface|does not hand them down|NoneType|has no RoPE)"


@pytest.mark.parametrize("name, options, says", [
    ("Mistral", {"sliding_window": 4}, "MistralAttention asks for attention with sliding_window = 4"),
    ("Qwen2Moe", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}, "sliding_window = 4"),
    ("Gemma2", {"head_dim": 8, "sliding_window": 99}, "softcap = 50"),
    ("OPT", {"word_embed_proj_dim": 32}, "has no RoPE"), ("GPT2", {"n_embd": 32, "n_head": 4}, OUT_OF_REACH),
    ("Lfm2", {"layer_types": ["conv", "full_attention"]}, "conv"),
    ("Bloom", {}, "does not ask transformers' AttentionInterface"),
    ("OpenAIGPT", {"n_embd": 32, "n_head": 4}, OUT_OF_REACH), ("Mpt", {"d_model": 32, "n_heads": 4}, OUT_OF_REACH),
    ("Mamba", {"state_size": 4}, "document 1 reaches document 2"),
    ("Falcon", {}, OUT_OF_REACH), ("Falcon", {"alibi": True}, OUT_OF_REACH), ("StableLm", {}, OUT_OF_REACH),
    ("Nemotron", {}, OUT_OF_REACH)])
def test_home_refuses_by_name_what_it_cannot_serve_and_leaves_it_as_it_was(tmp_path, name, options, says):
    folder = pretrained(name, tmp_path, **options)
    from transformers import AutoModelForCausalLM
    model, tokens = AutoModelForCausalLM.from_pretrained(folder), torch.arange(6)[None]
    before, implementation = model(tokens).logits, model.config._attn_implementation
    with pytest.raises(ValueError, match=rf"{type(model).__name__} cannot be given anchor attention: (.|\n)*{says}"):
        anchor_gpt.anchor_attention(model)
    assert model.config._attn_implementation == implementation and not model.training
    assert torch.equal(model(tokens).logits, before)


def test_home_refuses_a_transformers_that_is_too_old(tmp_path, monkeypatch):
    folder = pretrained("Llama", tmp_path)
    import transformers
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    monkeypatch.setattr(transformers, "__version__", "4.57.1")
    with pytest.raises(ValueError, match="transformers 4.57.1 is too old.*pip install 'transformers>=5'"):
        anchor_gpt.anchor_attention(model)


def test_home_the_proof_leaves_no_trace(tmp_path):
    folder = pretrained("Llama", tmp_path)
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained(folder, attention_dropout=0.5).train()
    model.model.layers[0].eval()  # as somebody may freeze it
    modes, rng = [m.training for m in model.modules()], torch.get_rng_state()
    anchor_gpt.anchor_attention(anchor_gpt.anchor_attention(model))  # twice is as good as once
    assert [m.training for m in model.modules()] == modes and torch.equal(torch.get_rng_state(), rng)
    assert all(p.grad is None for p in model.parameters())
    model.eval()
    doc_ids = torch.tensor([[0, 1, 1, 1, 2, 2]])
    tokens = torch.arange(6)[None]
    expected = model(tokens, doc_ids=doc_ids).logits
    again = anchor_gpt.anchor_attention(AutoModelForCausalLM.from_pretrained(folder))
    assert torch.equal(again(tokens, doc_ids=doc_ids).logits, expected)


@pytest.mark.parametrize("kind, says", [("full", "document 1 reaches document 2"),
                                        ("intra_doc", "the anchor does not reach document 1")])
def test_home_the_proof_finds_an_attention_that_is_not_anchor(tmp_path, monkeypatch, kind, says):
    causal_blocks = anchor_gpt.causal_blocks
    monkeypatch.setattr(anchor_gpt, "causal_blocks", lambda q, k, v, lengths, attention, scale: causal_blocks(
        q, k, v, lengths, kind, scale))
    with pytest.raises(ValueError, match=says):
        given_anchor_attention("Llama", tmp_path)


@pytest.mark.parametrize("call, says", [
    ({}, r"LlamaForCausalLM got no doc_ids: call model\(tokens, doc_ids=doc_ids\).*set_attn_implementation"),
    ({"doc_ids": torch.tensor([[0, 1, 1]])}, r"doc_ids is \(1, 3\), but q has 1 rows of 6 tokens"),
    ({"doc_ids": torch.tensor([[0, 1, 1, 2, 2, 2]]), "position_ids": torch.arange(6)[None]}, "leave them out"),
    ({"doc_ids": torch.tensor([[0, 1, 1, 2, 2, 2]]), "attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1]])},
     "padded on the left.*index 0")])
def test_home_refuses_calls_that_mean_something_else(tmp_path, call, says):
    model, _ = given_anchor_attention("Llama", tmp_path)
    with pytest.raises(ValueError, match=says):
        model(torch.ones(1, 6, dtype=torch.int64), **call)


@pytest.mark.parametrize("mask", [[1] * 6, [1, 1, 1, 1, 0, 0]])
def test_home_takes_a_mask_of_ones_or_of_padding_on_the_right(tmp_path, mask):
    model, _ = given_anchor_attention("Llama", tmp_path)
    tokens, doc_ids = torch.arange(6)[None], torch.tensor([[0, 1, 1, 2, 3, 3]])
    assert torch.equal(model(tokens, doc_ids=doc_ids, attention_mask=torch.tensor([mask])).logits,
                       model(tokens, doc_ids=doc_ids).logits)


def test_home_refuses_dropout_in_training_alone(tmp_path):
    model, _ = given_anchor_attention("Llama", tmp_path, attention_dropout=0.5)
    call = lambda: model(torch.ones(1, 6, dtype=torch.int64), doc_ids=torch.tensor([[0, 1, 1, 1, 2, 2]]))
    assert call().logits.shape == (1, 6, 258)
    model.train()
    with pytest.raises(ValueError, match="dropout = 0.5"):
        call()


def test_home_never_ignores_doc_ids_once_it_was_called(tmp_path):
    """Inference goes on in causal attention when told to; doc_ids would be ignored then, so they are refused."""
    model, _ = given_anchor_attention("Llama", tmp_path)
    model.set_attn_implementation("sdpa")
    tokens = torch.arange(6)[None]
    assert model.generate(tokens, max_new_tokens=3, do_sample=False, pad_token_id=0).shape == (1, 9)
    with pytest.raises(ValueError, match="LlamaForCausalLM would ignore doc_ids.*'sdpa' now.*anchor_attention"):
        model(tokens, doc_ids=torch.tensor([[0, 1, 1, 1, 2, 2]]))


def test_home_looks_at_the_document_lengths_once_a_forward(tmp_path, monkeypatch):
    model, _ = given_anchor_attention("Llama", tmp_path, num_hidden_layers=3)
    calls = []
    monkeypatch.setattr(anchor_gpt, "document_lengths", lambda d: calls.append(1) or document_lengths(d))
    model(torch.arange(6)[None], doc_ids=torch.tensor([[0, 1, 1, 1, 2, 2]]))
    assert len(calls) == 1


def test_home_output_is_contiguous_for_models_that_view_it():
    q = torch.randn(2, 4, 6, 8)
    module = mock.Mock(is_causal=True, config=mock.Mock(layer_types=None, sliding_window=None))
    y, _ = anchor_gpt.hugging_face_attention(module, q, q, q, None, doc_ids=torch.tensor([[0, 1, 1, 2, 2, 2]] * 2))
    assert y.shape == (2, 6, 4, 8) and y.is_contiguous()


def test_home_compiles_once_for_all_packings(tmp_path):
    model, _ = given_anchor_attention("Llama", tmp_path)
    graphs = []
    compiled = torch.compile(model, backend=lambda graph, inputs: graphs.append(graph) or graph)
    for i in range(12):
        doc_ids = bench.log_normal_doc_ids(40, 8, i)
        tokens = random_tokens(doc_ids, i)
        expected = model(tokens, doc_ids=doc_ids, labels=tokens, use_cache=False).loss
        loss = compiled(tokens, doc_ids=doc_ids, labels=tokens, use_cache=False).loss
        loss.backward()
        assert_close(loss, expected, 1e-5)
        if i == 0:
            n_graphs = len(graphs)
    assert len(graphs) == n_graphs > 0


def test_home_bench_records_the_weights_that_the_model_has(tmp_path):
    folder = pretrained("Qwen2", tmp_path)
    model, tokens = bench.load_model(folder)[0], torch.randint(258, (1, 20), generator=torch.Generator().manual_seed(0))
    model.set_attn_implementation("eager")
    eager = model(tokens, output_attentions=True).attentions
    shifted = model(tokens, output_attentions=True, position_ids=torch.arange(20)[None] + 1000).attentions
    layers = bench.model_change_by_shift(model, tokens, 1000)
    for (changed, mass), before, after in zip(layers, eager, shifted, strict=True):
        assert_close(mass, before[0].sum(dim=(0, 1)), 1e-4)
        assert_close(changed, (before - after)[0].abs().sum(dim=(0, 1)), 1e-4)


def test_home_bench_runs_on_a_pretrained_model(tmp_path, capsys):
    folder = pretrained("Llama", tmp_path / "tiny")
    bench.main(["rope", "--model", folder, "--context-lengths", "16", "32", "--json", str(tmp_path / "x.json")])
    context = json.loads((tmp_path / "x.json").read_text())["rope"]["context"]
    assert all(1000 * low < high for (_, low), (_, high) in zip(context["float32"], context["bfloat16"]))
    bench.main(["speed", "--model", folder, "--context-lengths", "64", "--mean-lengths", "8", "--repeats", "1", "--device", "cpu",
                "--json", str(tmp_path / "x.json")])
    rows = json.loads((tmp_path / "x.json").read_text())["speed"]
    assert [r["case"] for r in rows] == ["full", "anchor"]
    weights = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48) + 258 * 32  # q and o, k and v, the MLP; the head
    doc_ids = bench.log_normal_doc_ids(64, 8, 0)
    for row in rows:
        pairs = expected_mask(doc_ids, row["case"]).sum().item()
        flops = 6 * 64 * weights + 3.5 * 4 * pairs * 2 * 32
        assert row["share_of_limit"] == pytest.approx(flops / row["seconds"] / bench.limit(DTYPE, "cpu"))
    assert "all layers" in capsys.readouterr().out


def test_home_refuses_a_cache(tmp_path):
    folder = pretrained("Llama", tmp_path)
    from transformers import AutoModelForCausalLM
    model = anchor_gpt.anchor_attention(AutoModelForCausalLM.from_pretrained(folder))
    doc_ids = torch.tensor([[0, 1, 1, 1]])
    cache = model(torch.ones(1, 4, dtype=torch.int64), doc_ids=doc_ids, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="got 1 queries and 5 keys"):
        model(torch.ones(1, 1, dtype=torch.int64), doc_ids=doc_ids[:, :1], past_key_values=cache)


# ----------------------------------------------------------------------------------------------------------------
# CUDA


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)], ids=["float32", "bfloat16"])
@both_ways
@every_kind
@given(doc_ids=packings(max_tokens=60), seed=seeds, heads=heads)
def test_cuda_equals_float64_on_the_cpu(attend, attention, dtype, tolerance, doc_ids, seed, heads):
    q, k, v = (x.detach().to(dtype) for x in random_qkv(doc_ids, seed, *heads, head_dim=16))
    exact = outputs_and_gradients(attend_by_mask, *(x.double().requires_grad_() for x in (q, k, v)), doc_ids, attention)
    got = outputs_and_gradients(attend, *(x.cuda().requires_grad_() for x in (q, k, v)), doc_ids.cuda(), attention)
    for a, b in zip(got, exact):
        assert_close(a.cpu(), b, tolerance * max(1.0, b.abs().max().item()))
