"""The paper's claims, measured on this machine.

    python bench.py                       # a quick version of all three parts
    python bench.py speed                 # AnchorAttention halves the training time: time and memory against full
    python bench.py rope                  # bfloat16 breaks RoPE: where exactly, and by how much
    python bench.py quality               # AnchorAttention trains a better long-context model: what each kind learns
    python bench.py rope --checkpoint out/checkpoint.pt --plot assets

Every time is the median of runs that take turns (A B C A B C ...) after a warm-up, and every ratio is of two
medians of the same series, since machines are noisy. Peak memory is CUDA's counter, or on a CPU the peak of a process of its own.
"""
import argparse
import json
import math
import multiprocessing
import re
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

import anchor_gpt
import train
from anchor_gpt import (ATTENTIONS, GPT, GPTConfig, apply_rope, attend_by_document, attend_by_mask, attention_mask,
                        check_plain_attention, document_lengths, hugging_face_attention, rope_cos_sin)
from data import (BOS, NO_TARGET, VOCAB_SIZE, PackedRows, encode, load_documents, recall_batch, split_documents,
                  visible_share)


def print_table(title, header, rows):
    """Columns aligned: the first to the left, the others to the right."""
    cells = [header] + [[str(x) for x in row] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    print(f"\n{title}\n")
    for n, row in enumerate(cells):
        print("  ".join(x.ljust(w) if i == 0 else x.rjust(w) for i, (x, w) in enumerate(zip(row, widths))).rstrip())
        if n == 0:
            print("  ".join("-" * w for w in widths))


# ----------------------------------------------------------------------------------------------------------------
# Speed


def log_normal_doc_ids(context_length, mean_length, seed):
    """doc_ids (1, T) of documents whose lengths are log-normal (sigma 1) with a mean of mean_length tokens."""
    lengths = np.random.default_rng(seed).lognormal(math.log(mean_length) - 0.5, size=context_length)
    lengths = np.maximum(1, lengths.round().astype(int))
    lengths = lengths[:np.searchsorted(lengths.cumsum(), context_length - 1) + 1]  # as many as fill the row
    doc_ids = np.repeat(np.arange(1, len(lengths) + 1), lengths)[:context_length - 1]
    return torch.from_numpy(np.concatenate(([0], doc_ids)))[None]


def doc_ids_for(context_length, mean_length, data):
    """A row's doc_ids: from a corpus (data: a path) where mean_length is None, else log-normal."""
    if mean_length is None:
        return PackedRows(load_documents(data or None), context_length, seed=0).shuffled_batch(0, 1)[1]
    return log_normal_doc_ids(context_length, mean_length, seed=0)


def prepare_flex(doc_ids, device):
    """PyTorch's FlexAttention, compiled, as the official code has it: for comparison alone."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    torch._dynamo.reset()  # else the ninth row would no longer be compiled
    ids, T = doc_ids[0].to(device), doc_ids.shape[1]
    mask = create_block_mask(lambda b, h, i, j: (j <= i) & ((ids[i] == ids[j]) | (j == 0)), 1, None, T, T, device=device,
                             _compile=device != "cpu")  # uncompiled it needs T x T
    return partial(torch.compile(flex_attention, dynamic=False), block_mask=mask)


def prepare_varlen(doc_ids, device):
    """One call of PyTorch's variable-length kernel (CUDA, 16 bit) on a row with its copies of the anchor in it: for
    comparison alone."""
    from torch.nn.attention.varlen import varlen_attn
    row = doc_ids[0].numpy()
    starts = np.flatnonzero(np.diff(row))[1:] + 1  # of the second document, the third, ...
    order = np.insert(np.arange(len(row)), starts, 0)  # the row with a copy of the anchor in front of each of them
    ends = np.append(starts + np.arange(len(starts)), len(order))
    is_copy = np.zeros(len(order), dtype=bool)
    is_copy[ends[:-1]] = True
    order, kept = (torch.from_numpy(x).to(device) for x in (order, np.flatnonzero(~is_copy)))
    cumulative = torch.from_numpy(np.insert(ends, 0, 0)).to(device, torch.int32)
    longest = int(np.diff(ends, prepend=0).max())

    def attend(q, k, v):
        q, k, v = (x[0].transpose(0, 1)[order] for x in (q, k, v))  # (T + copies, H, D)
        return varlen_attn(q, k, v, cumulative, cumulative, longest, longest, window_size=(-1, 0))[kept].transpose(0, 1)[None]
    return attend


def prepare_by_document(attention, doc_ids, device):
    return partial(attend_by_document, doc_ids=doc_ids, attention=attention, lengths=document_lengths(doc_ids))


def prepare_by_mask(attention, doc_ids, device):
    return partial(attend_by_mask, doc_ids=doc_ids, attention=attention, mask=attention_mask(doc_ids.to(device), attention))


CASES = {  # what is timed: (attention kind, what makes attend(q, k, v) for a row, whether backward, too)
    "full": ("full", partial(prepare_by_document, "full"), True),
    "intra_doc": ("intra_doc", partial(prepare_by_document, "intra_doc"), True),
    "anchor": ("anchor", partial(prepare_by_document, "anchor"), True),
    "anchor by mask": ("anchor", partial(prepare_by_mask, "anchor"), True),
    "anchor by varlen": ("anchor", prepare_varlen, True),
    "full, forward": ("full", partial(prepare_by_document, "full"), False),
    "anchor, forward": ("anchor", partial(prepare_by_document, "anchor"), False),
    "anchor by flex, forward": ("anchor", prepare_flex, False),
}


def attention_run(attend, backward, T, device, dtype, n_head=6, head_dim=64):
    """Fresh inputs, then one attention (and its backward) -> seconds."""
    q, k, v, g = (torch.randn(1, T, n_head, head_dim, device=device, dtype=dtype).transpose(1, 2) for _ in range(4))
    for x in (q, k, v):
        x.requires_grad_(backward)
    began = now(device)
    y = attend(q, k, v)
    if backward:
        torch.autograd.grad(y, (q, k, v), g)
    return now(device) - began


def prepare_attention(case, doc_ids, device, dtype):
    """What a model works out once a forward, not once a layer, is outside of what is timed."""
    _, prepare, backward = CASES[case]
    return partial(attention_run, prepare(doc_ids, device), backward, doc_ids.shape[1], device, dtype)


class PlainGPT(nn.Module):
    """The yardstick: a GPT without packing, in the way of nanoGPT (learned positions, LayerNorm, GELU, full attention)."""

    def __init__(self, config, context_length):
        super().__init__()
        C, self.n_head = config.n_embd, config.n_head
        self.embedding, self.positions = nn.Embedding(config.vocab_size, C), nn.Embedding(context_length, C)
        self.blocks = nn.ModuleList(nn.ModuleDict({
            "norm": nn.LayerNorm(C, bias=False), "qkv": nn.Linear(C, 3 * C, bias=False), "proj": nn.Linear(C, C, bias=False),
            "mlp": nn.Sequential(nn.LayerNorm(C, bias=False), nn.Linear(C, 4 * C, bias=False), nn.GELU(),
                                 nn.Linear(4 * C, C, bias=False))}) for _ in range(config.n_layer))
        self.norm, self.head = nn.LayerNorm(C, bias=False), nn.Linear(C, config.vocab_size, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens, doc_ids, targets):
        x = self.embedding(tokens) + self.positions.weight[:tokens.shape[1]]
        for block in self.blocks:
            qkv = block["qkv"](block["norm"](x)).unflatten(2, (3, self.n_head, -1)).permute(2, 0, 3, 1, 4)  # (3, B, H, T, D)
            x = x + block["proj"](F.scaled_dot_product_attention(*qkv, is_causal=True).transpose(1, 2).flatten(2))
            x = x + block["mlp"](x)
        logits = self.head(self.norm(x))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=NO_TARGET)


STEPS = {"full": "full", "intra_doc": "intra_doc", "anchor": "anchor", "anchor, checkpointed": "anchor", "plain GPT": "full"}


def make_step(case, context_length, device):
    """train.py's default model for this device, or the yardstick of the same width and depth; its optimizer; its dtype."""
    defaults = {name: values[device != "cpu"] for name, values in train.SETTINGS.items()}
    sizes = {name: defaults[name] for name in ("n_layer", "n_head", "n_kv_head", "n_embd", "n_hidden")}
    config = GPTConfig(vocab_size=VOCAB_SIZE, attention=STEPS[case], checkpoint_activations="checkpointed" in case, **sizes)
    torch.manual_seed(0)
    model = (PlainGPT(config, context_length) if case == "plain GPT" else GPT(config)).to(device)
    return model, train.make_optimizer(model, 0.1), defaults["dtype"]


def step_run(step, doc_ids, device):
    """One training step (forward, backward, optimizer) on a row of random tokens -> seconds."""
    model, optimizer, dtype = step
    tokens = torch.randint(256, doc_ids.shape)
    targets = tokens.roll(-1, dims=1)
    began = now(device)
    train.train_step(model, optimizer, [(tokens, doc_ids, targets)], 1e-4, 1.0, dtype)
    return now(device) - began


def load_model(folder, dtype=torch.float32):
    """A causal language model of Hugging Face transformers and its tokenizer, with anchor attention at hand."""
    try:
        from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer
    except ImportError:
        raise ValueError("--model needs transformers: pip install transformers") from None
    AttentionInterface.register("anchor", hugging_face_attention)
    AttentionInterface.register("recording", recording_attention)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype), AutoTokenizer.from_pretrained(folder)


class PretrainedStep(nn.Module):
    """A pretrained model in the place of ours in train_step: full attention without doc_ids, anchor with them."""

    def __init__(self, model, attention):
        super().__init__()
        self.model, self.attention = model, attention

    def forward(self, tokens, doc_ids, targets):
        self.model.set_attn_implementation("anchor" if self.attention == "anchor" else "sdpa")
        options = {"doc_ids": doc_ids} if self.attention == "anchor" else {}
        logits = self.model(tokens, use_cache=False, **options).logits
        return logits, F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=NO_TARGET)


def now(device):
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter()


def take_turns(runs, repeats, what):
    """{name: function -> seconds} -> {name: [seconds, ...]}, after one warm-up of each."""
    seconds = {name: [] for name in runs}
    for turn in tqdm(range(repeats + 1), desc=what, leave=False, disable=None):
        for name, run in runs.items():
            seconds[name].append(run())
    return {name: times[1:] for name, times in seconds.items()}


def peak_of_this_process(kind, case, doc_ids, device, dtype):
    before = torch.cuda.memory_allocated()  # by what was timed; 0 without CUDA
    if kind == "attention":
        run = prepare_attention(case, doc_ids, device, dtype)
    else:
        run = partial(step_run, make_step(case, doc_ids.shape[1], device), doc_ids, device)
    run()
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
        run()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    if sys.platform == "linux":  # where ru_maxrss also counts the process that started this one
        return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) / 2**10
    import resource  # Unix alone has it
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def peak_memory(*case):
    """MiB at the peak of a case: on a CPU that of a new process, PyTorch included (about 250 MiB)."""
    if case[3] != "cpu":
        return peak_of_this_process(*case)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(peak_of_this_process, *case).result()


def speed(args):
    device, dtype = args.device, getattr(torch, args.dtype)
    if args.model:
        model = load_model(args.model)[0].to(device).train()
        optimizer, args.no_memory = train.make_optimizer(model, 0.1), True
    varlen = device != "cpu" and dtype == torch.bfloat16 and torch.__version__ >= (2, 11)  # older ones have another signature
    results = []
    for mean_length in [None] if args.data is not None else args.mean_lengths:
        source = f"documents of {args.data or 'the standard library'}" if args.data is not None else \
            f"log-normal documents of {mean_length:,} tokens on average"
        for T in args.context_lengths:
            doc_ids = doc_ids_for(T, mean_length, args.data)
            if args.model:
                runs = {c: partial(step_run, (PretrainedStep(model, c), optimizer, train.SETTINGS["dtype"][device != "cpu"]),
                                   doc_ids, device) for c in ("full", "anchor")}
                results += summarize("training step", runs, doc_ids, args, source, dtype, Path(args.model).name)
                continue
            fits = {"full": T <= args.full_up_to, "plain": T <= args.full_up_to, "mask": T <= args.mask_up_to,
                    "forward": args.flex, "varlen": varlen}  # a case runs where all that its name says does
            here = [c for c in CASES if all(ok for word, ok in fits.items() if word in c)]
            runs = {c: prepare_attention(c, doc_ids, device, dtype) for c in here}
            results += summarize("attention", runs, doc_ids, args, source, dtype)
            if args.step:
                here = [c for c in STEPS if all(ok for word, ok in fits.items() if word in c)]
                runs = {c: partial(step_run, make_step(c, T, device), doc_ids, device) for c in here}
                results += summarize("training step", runs, doc_ids, args, source, dtype)
    return results


def summarize(kind, runs, doc_ids, args, source, dtype, model="train.py's default model and dtype"):
    """Times the runs, prints their table and returns it as a list of dicts."""
    T = doc_ids.shape[1]
    seconds = take_turns(runs, args.repeats, f"{kind} at {T:,}")
    median = {c: statistics.median(s) for c, s in seconds.items()}
    table = []
    for c in runs:
        base = median.get("full, forward" if "forward" in c else "full")
        share = visible_share(doc_ids, STEPS[c] if c in STEPS else CASES[c][0])
        table.append({"kind": kind, "source": source, "context_length": T, "case": c, "visible": share, "seconds": median[c],
                      "spread": (max(seconds[c]) - min(seconds[c])) / median[c], "times_faster": base and base / median[c],
                      "cost_per_visible_pair": base and median[c] / base / share, "tokens_per_second": T / median[c],
                      "peak_mib": None if args.no_memory else peak_memory(kind, c, doc_ids, args.device, dtype)})
    what = f"6 heads of 64, {args.dtype}, forward + backward" if kind == "attention" else model
    print_table(f"{kind}, {what}; {T:,} tokens, {int(doc_ids.max()):,} {source}",
                ["", "visible", "median ms", "spread", "x full", "cost a visible pair", "tokens/s", "peak MiB"],
                [[r["case"], f"{r['visible']:.1%}", f"{1e3 * r['seconds']:,.1f}", f"{r['spread']:.0%}",
                  *(f"{r[x]:.2f}" if r[x] else "-" for x in ("times_faster", "cost_per_visible_pair")),
                  f"{r['tokens_per_second']:,.0f}", f"{r['peak_mib']:,.0f}" if r["peak_mib"] else "-"] for r in table])
    return table


# ----------------------------------------------------------------------------------------------------------------
# RoPE in limited precision

PRECISIONS = {  # name: dtype of q and k before and after the rotation, of the angles, of the cos and sin tables
    "float64": (torch.float64, torch.float64, torch.float64),
    "float32 throughout": (torch.float32, torch.float64, torch.float32),
    "float32 angles": (torch.float32, torch.float32, torch.float32),
    "bfloat16 q and k": (torch.bfloat16, torch.float64, torch.float32),
    "bfloat16 tables, too (the paper)": (torch.bfloat16, torch.float64, torch.bfloat16),
    "bfloat16 angles, too": (torch.bfloat16, torch.bfloat16, torch.bfloat16),
}


def rotate(x, positions, storage, angles, tables, theta=10_000.0):
    """x (H, T, D) rotated to positions (T,) in the given dtypes -> float64 (H, T, D) of what is left of it."""
    if angles == torch.float64:
        cos, sin = rope_cos_sin(positions[None], x.shape[-1], theta, tables)
    else:  # the bugs that rope_cos_sin avoids
        frequencies = theta ** -(torch.arange(0, x.shape[-1], 2).double() / x.shape[-1])
        angle = (positions.to(angles)[:, None] * frequencies.to(angles))[None, None]
        cos, sin = angle.cos().to(tables), angle.sin().to(tables)
    return apply_rope(x.to(storage)[None], cos, sin)[0].double()


def logits_and_weights(q, k, positions, precision, theta=10_000.0):
    """Causal attention of q and k (H, T, D) at positions (T,), all but the rotation in float64 -> two (H, T, T)."""
    q, k = (rotate(x, positions, *PRECISIONS[precision], theta) for x in (q, k))
    logits = q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])
    hidden = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
    return logits.masked_fill(hidden, 0.0), logits.masked_fill(hidden, -math.inf).softmax(dim=-1)


def change_by_shift(q, k, shift, precision, theta=10_000.0):
    """What a shift of all positions changes, where exact arithmetic changes nothing.

    -> (root mean square change of a visible logit, |change of the weights| summed over heads and queries (T,): the
    paper's D is its sum, entry j the share of key j, weight of each key summed likewise (T,)).
    """
    T = q.shape[1]
    before, after = (logits_and_weights(q, k, torch.arange(T) + s, precision, theta) for s in (0, shift))
    pairs = q.shape[0] * T * (T + 1) / 2
    logits = ((before[0] - after[0]).square().sum() / pairs).sqrt().item()
    return logits, (before[1] - after[1]).abs().sum(dim=(0, 1)), before[1].sum(dim=(0, 1))


def logit_error(position, precision, distance=100, n=256, head_dim=64):
    """How far a logit of unit vectors is from exact at a position: the root mean square of n pairs `distance` apart."""
    generator = torch.Generator().manual_seed(0)
    q, k = torch.nn.functional.normalize(torch.randn(2, n, 1, head_dim, generator=generator, dtype=torch.float64), dim=-1)
    storage = PRECISIONS[precision][0]
    q, k = q.to(storage).double(), k.to(storage).double()  # rounding the inputs is nobody's rotation

    def logit(name):
        m, n = torch.tensor([position + distance]), torch.tensor([position])
        return (rotate(q, m, *PRECISIONS[name]) * rotate(k, n, *PRECISIONS[name])).sum(dim=-1)
    return (logit(precision) - logit("float64")).square().mean().sqrt().item()


def model_qk(checkpoint, context_length, data):
    """q and k before their rotation on one long held-out document -> [(q, k), ...] a layer, each (H, T, D) float64."""
    saved = train.load_checkpoint(Path(checkpoint))
    names = ("n_layer", "n_head", "n_kv_head", "n_embd", "n_hidden", "context_length")
    config = GPTConfig(vocab_size=VOCAB_SIZE, attention="full", **{name: saved["settings"][name] for name in names})
    model = GPT(config)
    model.load_state_dict(saved["model"])
    _, held_out = split_documents(load_documents(data or None), saved["settings"]["val_fraction"], seed=0)
    document = max(held_out, key=len)
    if len(document) < context_length:
        raise ValueError(f"the longest held-out document has {len(document)} bytes, expected {context_length}: "
                         "lower --context-lengths or name another --data")
    captured, original = [], anchor_gpt.apply_rope
    anchor_gpt.apply_rope = lambda x, cos, sin: captured.append(x) or original(x, cos, sin)
    try:
        with torch.no_grad():
            model(torch.tensor([[BOS] + encode(document[:context_length - 1])]))
    finally:
        anchor_gpt.apply_rope = original
    H, group = config.n_head, config.n_head // config.n_kv_head
    return [(x[0, :H].double(), x[0, H:].double().repeat_interleave(group, dim=0)) for x in captured]


recorded = []  # of recording_attention: the attention weights of each layer, (H, T, T)


def recording_attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **options):
    """Full causal attention for transformers' AttentionInterface that keeps its weights, from q and k as they are rotated
    and rounded, all else in float64."""
    check_plain_attention(module, query, key, attention_mask, scaling, dropout, options)
    T, group = query.shape[2], query.shape[1] // key.shape[1]
    logits = query[0].double() @ key[0].double().repeat_interleave(group, dim=0).transpose(1, 2) / math.sqrt(query.shape[3])
    recorded.append(logits.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -math.inf).softmax(dim=-1).float())
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True).transpose(1, 2), None


def model_change_by_shift(model, tokens, shift):
    """A pretrained model's attention weights on tokens (1, T) when all positions shift -> [(|change| summed over heads and
    queries (T,), weight of each key summed likewise (T,)), ...] a layer. A layer's inputs have changed, too, by then: the
    change is that of the whole model, as in the paper's Figure 1."""
    runs = []
    for s in (0, shift):
        recorded.clear()
        with torch.no_grad():
            model(tokens, position_ids=torch.arange(tokens.shape[1])[None] + s, use_cache=False)
        runs.append(recorded.copy())
    recorded.clear()
    return [((a - b).abs().sum(dim=(0, 1), dtype=torch.float64), a.sum(dim=(0, 1), dtype=torch.float64)) for a, b in zip(*runs)]


def rope_of_model(args):
    text = max(load_documents(args.data or None)[:200], key=len).decode(errors="replace")[:20 * max(args.context_lengths)]
    name = Path(args.model).name
    results = {"source": name, "suffix": "_model", "context": {}, "share": {}}
    for dtype in ("float32", "bfloat16"):
        # Not model.to(dtype), which would also round the rotation's frequencies.
        model, tokenizer = load_model(args.model, getattr(torch, dtype))
        model.eval().set_attn_implementation("recording")
        ids = tokenizer(text, add_special_tokens=False).input_ids
        if len(ids) < max(args.context_lengths):
            raise ValueError(f"the text has {len(ids)} tokens, expected {max(args.context_lengths)}: lower --context-lengths or name "
                             "another --data")
        first = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        for T in tqdm(args.context_lengths, desc=dtype, leave=False, disable=None):
            layers = model_change_by_shift(model, torch.tensor([[first] + ids[:T - 1]]), 16)
            results["context"].setdefault(dtype, []).append((T, sum(changed.sum().item() for changed, _ in layers)))
    print_table(f"D, the summed |change| of all attention weights when all positions shift by 16; {name}",
                ["model in", *(f"{T:,}" for T in args.context_lengths)],
                [[dtype, *(f"{D:,.3g}" for _, D in row)] for dtype, row in results["context"].items()])
    changed, mass = (sum(x) for x in zip(*layers))
    results["share"] = {"all layers": ((changed / changed.sum()).tolist(), (mass / mass.sum()).tolist())}
    print_shares(f"{name} in bfloat16; {T:,} tokens", [(f"layer {i}", *layer) for i, layer in enumerate(layers)]
                 + [("all layers", changed, mass)])
    return results


def print_shares(what, layers):
    """The first token's share: layers of (name, |change| a key (T,), weight a key (T,))."""
    rows = []
    for name, changed, mass in layers:
        share, held = (changed[0] / changed.sum()).item(), (mass[0] / mass.sum()).item()
        rows.append([name, f"{changed.sum().item():,.1f}", f"{share:.2%}", f"{held:.2%}", f"{2 / (len(changed) + 1):.2%}",
                     f"{share / max(held, 1e-12):.2f}"])
    print_table(f"the first token's share of D; {what}", ["", "D", "of D", "of the weights", "fair share", "D / weights"], rows)


def rope(args):
    if args.model:
        return rope_of_model(args)
    longest = max(args.context_lengths)
    if args.checkpoint:
        layers, source = model_qk(args.checkpoint, longest, args.data), f"{args.checkpoint}, a held-out document"
    else:
        generator = torch.Generator().manual_seed(0)
        layers = [torch.randn(2, 4, longest, 64, generator=generator, dtype=torch.float64).unbind()]
        source = "random q and k, 4 heads of 64"
    results = {"source": source, "suffix": "_checkpoint" if args.checkpoint else "", "error": {}, "shift": {}, "context": {},
               "share": {}}

    positions = [2**i for i in range(0, 18)]
    for name in tqdm(PRECISIONS, desc="error by position", leave=False, disable=None):
        results["error"][name] = [(m, logit_error(m, name)) for m in positions]
    print_table("error of a logit of unit vectors (spread 0.125) at a position, root mean square",
                ["precision", *(f"{m:,}" for m in positions[::4] + positions[-1:])],
                [[name, *(f"{e:.1e}" for _, e in errors[::4] + errors[-1:])] for name, errors in results["error"].items()])

    shifts, T = (1, 16, 256, 4096, 65536), min(512, longest)
    results["shift_length"] = T
    for name in tqdm(PRECISIONS, desc="change by shift", leave=False, disable=None):
        results["shift"][name] = []
        for shift in shifts:
            changes = [change_by_shift(q[:, :T], k[:, :T], shift, name) for q, k in layers]
            logits = math.sqrt(sum(c[0]**2 for c in changes) / len(changes))
            weights = sum(c[1].sum().item() for c in changes) / len(changes) / layers[0][0].shape[0] / T
            results["shift"][name].append((shift, logits, weights))
    for column, what in ((1, "change of a logit, root mean square"), (2, "summed |change| of a query's weights (at most 2)")):
        print_table(f"{what}, when all positions shift; {T} tokens; {source}",
                    ["precision", *(f"{s:+,}" for s in shifts)],
                    [[name, *(f"{row[column]:.1e}" for row in rows)] for name, rows in results["shift"].items()])

    names = [name for name in PRECISIONS if name != "float64"]
    for name in tqdm(names, desc="difference by context length", leave=False, disable=None):
        results["context"][name] = []
        for T in args.context_lengths:
            D = sum(change_by_shift(q[:, :T], k[:, :T], 16, name)[1].sum().item() for q, k in layers)
            results["context"][name].append((T, D))
    print_table(f"D, the summed |change| of all attention weights when all positions shift by 16; {source}",
                ["precision", *(f"{T:,}" for T in args.context_lengths)],
                [[name, *(f"{D:,.3g}" for _, D in row)] for name, row in results["context"].items()])

    paper = "bfloat16 tables, too (the paper)"
    changes = [(f"layer {i}", *change_by_shift(q, k, 16, paper)[1:]) for i, (q, k) in enumerate(layers)]
    results["share"] = {name: ((changed / changed.sum()).tolist(), (mass / mass.sum()).tolist()) for name, changed, mass in changes}
    print_shares(f"{paper}; {longest:,} tokens; {source}", changes)

    q, k = layers[0]
    rows = []
    for name, dtypes in PRECISIONS.items():
        key = k[:, :1].to(dtypes[0]).double()
        moved = [(rotate(key, torch.tensor([p]), *dtypes) - rotate(key, torch.tensor([p]), *PRECISIONS["float64"])).norm()
                 / key.norm() for p in (0, 16, 4096)]
        rows.append([name, *(f"{x.item():.1e}" for x in moved)])
    print_table("relative error of the first token's rotated key: exact at position 0, where the anchor always is",
                ["precision", "at 0 (anchor)", "at 16", "at 4,096"], rows)
    return results


# ----------------------------------------------------------------------------------------------------------------
# Quality


def definitions(documents):
    """Each function or method of Python files as a document, and what stands before it: short ones, many to a row."""
    return [d for document in documents for d in re.split(rb"\n(?= *(?:async )?def )", document) if d]


def train_side_by_side(config, batch, steps, seed, look, dtype, learning_rate=1e-3, weights=None):
    """Trains one model of each attention kind from the same weights on the same batches, a step each in turn, so that a
    noisy machine is noisy for all of them alike.

    batch(step) -> (tokens, doc_ids, targets); look(model) -> what to report, before the first step and eight times on the
    way; weights: a state_dict to start from, else fresh ones from the seed.
    -> {attention: ([(step, seconds of training, report), ...], model)}
    """
    runs = {}
    for attention in ATTENTIONS:
        torch.manual_seed(seed)
        model = GPT(GPTConfig(attention=attention, **config))
        if weights:
            model.load_state_dict(weights)
        runs[attention] = [(0, 0.0, look(model))], model, train.make_optimizer(model, 0.1)
    seconds = dict.fromkeys(ATTENTIONS, 0.0)
    schedule = dict(learning_rate=learning_rate, warmup_steps=steps // 20, steps=steps)
    for step in tqdm(range(steps), desc=f"seed {seed}", leave=False, disable=None):
        data = batch(step)
        for attention, (history, model, optimizer) in runs.items():
            began = time.perf_counter()
            train.train_step(model, optimizer, [data], train.learning_rate_at(step, schedule), 1.0, dtype)
            seconds[attention] += time.perf_counter() - began
            if (step + 1) * 8 // steps > step * 8 // steps:
                history.append((step + 1, seconds[attention], look(model)))
    return {attention: (history, model) for attention, (history, model, _) in runs.items()}


def at_time(history, seconds):
    """The report, a number, of a run at a time: between two looks a straight line."""
    _, times, reports = zip(*history)
    return float(np.interp(seconds, times, reports))


def spread(values, form="{:.3f}"):
    """The mean of several seeds' values, and from the least to the largest."""
    mean = form.format(sum(values) / len(values))
    return mean if len(values) == 1 else f"{mean} ({form.format(min(values))}-{form.format(max(values))})"


def language(args, dtype):
    """Language modelling on short documents, the functions of the corpus, many to a row."""
    T = args.context_length
    train_documents, held_out = split_documents(load_documents(args.data or None), 0.05, seed=0)
    short, val = definitions(train_documents), PackedRows(definitions(held_out), T, seed=0)
    val_batch = val.shuffled_batch(0, min(32, val.rows_per_epoch))
    config = dict(vocab_size=VOCAB_SIZE, context_length=T, n_layer=4, n_head=4, n_kv_head=4, n_embd=256, n_hidden=688)
    results = {a: [] for a in ATTENTIONS}
    for seed in range(args.seeds):
        rows = PackedRows(short, T, seed)
        runs = train_side_by_side(config, lambda step: rows.shuffled_batch(step, 1), args.steps, seed,
                                  lambda model: train.evaluate(model, val_batch, 1, dtype)[0], dtype)
        shortest_time = min(history[-1][1] for history, _ in runs.values())
        for attention, (history, model) in runs.items():
            results[attention].append({
                "history": history, "at_equal_time": at_time(history, shortest_time),
                # half of each of these documents is beyond the trained length
                "by_position": train.loss_by_position(model, held_out, 2 * T, dtype, max_documents=32)})
    print_table(f"language: {args.steps} steps of a row of {T:,} tokens, {len(short):,} functions as documents, "
                f"{args.seeds} seeds: mean (least-largest), nats a token",
                ["", "visible", "seconds", "held-out loss", "at equal time"],
                [[a, f"{visible_share(rows.shuffled_batch(0, 64)[1], a):.1%}", spread([r["history"][-1][1] for r in runs], "{:.0f}"),
                  spread([r["history"][-1][2] for r in runs]), spread([r["at_equal_time"] for r in runs])]
                 for a, runs in results.items()])
    ranges = [(first, last) for first, last, _ in results["full"][0]["by_position"]]
    print_table("the same, by position in whole held-out files that are longer than twice the context",
                ["", *(f"{first:,}-{last:,}" for first, last in ranges)],
                [[a, *(spread([r["by_position"][i][2] for r in runs], "{:.2f}") for i in range(len(ranges)))]
                 for a, runs in results.items()])
    return results


def recall_rate(model, length, depth, n_facts, dtype, n_documents=32):
    """The share of documents of this length whose question the model answers right; a guess is right 1 time in 10."""
    right = []
    for i in range(0, n_documents, 8):
        tokens, doc_ids, targets = recall_batch(length, 8, n_facts, (7, length, i), depth, packed=False)
        with torch.no_grad(), train.autocast(model, dtype):
            right.append((model(tokens, doc_ids)[0].argmax(dim=-1) == targets)[targets != NO_TARGET])
    return torch.cat(right).double().mean().item()


def recall(args, dtype):
    """The paper's protocol in miniature: one model learns recall in short documents, one to a row; each kind continues
    from it on rows several times as long, with documents of all lengths packed into them."""
    short, T = args.short_length, args.recall_length
    config = dict(vocab_size=VOCAB_SIZE, context_length=T, n_layer=2, n_head=2, n_kv_head=2, n_embd=128, n_hidden=344)
    results, lengths, depths = {a: [] for a in ATTENTIONS}, (short, T // 2, T, 2 * T), (0.0, 0.5, 1.0)
    for seed in range(args.seeds):
        torch.manual_seed(seed)
        base = GPT(GPTConfig(attention="full", **config))
        optimizer, schedule = train.make_optimizer(base, 0.1), dict(learning_rate=3e-3, warmup_steps=10, steps=args.short_steps)
        for step in tqdm(range(args.short_steps), desc=f"seed {seed}, {short} tokens", leave=False, disable=None):
            batch = recall_batch(short, 32, args.facts, (seed, 0, step), packed=False)
            train.train_step(base, optimizer, [batch], train.learning_rate_at(step, schedule), 1.0, dtype)
        runs = train_side_by_side(config, lambda step: recall_batch(T, 4, args.facts, (seed, 1, step)), args.recall_steps, seed,
                                  lambda model: recall_rate(model, T, None, args.facts, dtype), dtype, 1e-3, base.state_dict())
        for attention, (history, model) in runs.items():
            results[attention].append({
                "short": recall_rate(base, short, None, args.facts, dtype), "history": history,
                "rates": [[recall_rate(model, n, depth, args.facts, dtype) for depth in depths] for n in lengths]})
    looks = [step for step, _, _ in results["full"][0]["history"]]
    known = spread([r["short"] for r in results["full"]], "{:.0%}")
    print_table(f"recall of a fact among {args.facts} in {T:,} tokens by step on packed rows of {T:,}; all kinds start from one "
                f"model that had {args.short_steps} steps on {short} tokens and there recalls {known}",
                ["", "seconds", *map(str, looks)],
                [[a, spread([r["history"][-1][1] for r in runs], "{:.0f}"),
                  *(spread([r["history"][i][2] for r in runs], "{:.0%}") for i in range(len(looks)))] for a, runs in results.items()])
    print_table(f"the same after the last step, by context length ({2 * T:,} was never trained) and depth of the fact",
                ["", *(f"{n:,} at {depth:.0%}" for n in lengths for depth in depths)],
                [[a, *(spread([r["rates"][i][j] for r in runs], "{:.0%}") for i in range(len(lengths)) for j in range(len(depths)))]
                 for a, runs in results.items()])
    return results


def quality(args):
    dtype = train.SETTINGS["dtype"][0]
    results = {}
    if args.steps:
        results["language"] = language(args, dtype)
    if args.recall_steps:
        results["recall"] = recall(args, dtype)
    return results


# ----------------------------------------------------------------------------------------------------------------
# Pictures


def pyplot():
    try:
        import matplotlib
    except ImportError:
        sys.exit("--plot needs matplotlib: pip install matplotlib")
    matplotlib.use("agg")
    import matplotlib.pyplot as plt
    plt.rcParams.update({"figure.dpi": 80, "font.size": 10, "axes.grid": True, "grid.alpha": 0.3})
    return plt


def plot_rope(results, folder):
    plt = pyplot()
    whole = "error" not in results  # a whole pretrained model has no table by position
    figure, axes = plt.subplots(1 if whole else 2, 2, figsize=(9, 4 if whole else 8))
    context, share = axes.flat[-2:]
    for i, (name, row) in enumerate(results["context"].items()):
        context.loglog(*zip(*row), color=f"C{i}", marker="o", label=name)
    context.set(xlabel="context length (tokens)", ylabel="D, summed |change| of all weights", title="all positions shifted by 16")
    for i, (name, (changed, held)) in enumerate(results["share"].items()):
        edges = np.unique(np.geomspace(1, len(changed) + 1, 60).round().astype(int))  # means over ranges of keys that grow
        for shares, style, what in ((changed, "-", f"{name}: share of D"), (held, "--", "share of the weights")):
            share.loglog(edges[:-1], np.add.reduceat(shares, edges[:-1] - 1) / np.diff(edges), style, color=f"C{i}", label=what,
                         linewidth=1)
    share.set(xlabel="key (1 is the first token)", ylabel="share of a key", title="the paper's case")
    share.legend(fontsize=7, ncols=2)
    if not whole:
        error, shift = axes[0]
        for i, name in enumerate(results["context"]):
            error.loglog(*zip(*results["error"][name]), color=f"C{i}")
            shift.loglog(*zip(*((s, weights) for s, _, weights in results["shift"][name])), color=f"C{i}", marker="o")
        error.set(xlabel="position (tokens)", ylabel="error of a logit, RMS (logits: 0.125)",
                  title="unit vectors, 100 tokens apart")
        shift.set(xlabel="shift of all positions (tokens)", ylabel="summed |change| of a query's weights",
                  title=f"{results['shift_length']:,} tokens")
    for axis in axes.flat[:-1]:
        axis.set_xscale("log", base=2)
    figure.suptitle(results["source"], fontsize=10)
    figure.legend(*context.get_legend_handles_labels(), loc="lower center", ncols=3, fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.11 if whole else 0.06, 1, 1))
    figure.savefig(folder / f"rope{results['suffix']}.png")


def plot_speed(results, folder):
    plt = pyplot()
    figure, axes = plt.subplots(1, 2, figsize=(9, 4))
    source = results[0]["source"]
    for axis, kind in zip(axes, ("attention", "training step")):
        rows = [r for r in results if r["kind"] == kind and r["source"] == source]
        for case in dict.fromkeys(r["case"] for r in rows):
            points = [(r["context_length"], r["seconds"]) for r in rows if r["case"] == case]
            axis.loglog(*zip(*points), marker="o", label=case, base=2)
        axis.set_yscale("log", base=10)
        axis.set(xlabel="context length (tokens)", ylabel="time (s)", title=kind)
        axis.legend(fontsize=8)
    figure.suptitle(source, fontsize=10)
    figure.tight_layout()
    figure.savefig(folder / "speed.png")


def plot_quality(results, folder):
    plt = pyplot()
    labels = {"language": "held-out loss (nats a token)", "recall": "questions answered right (share)"}
    for task, kinds in results.items():
        figure, (by_step, by_time) = plt.subplots(1, 2, figsize=(9, 4), sharey=True)
        for attention, runs in kinds.items():
            for i, run in enumerate(runs):
                steps, seconds, reports = zip(*run["history"])
                style = dict(color=f"C{ATTENTIONS.index(attention)}", linewidth=1, label=None if i else attention)
                by_step.plot(steps, reports, **style)
                by_time.plot(seconds, reports, **style)
        by_step.set(xlabel="step", ylabel=labels[task])
        by_time.set(xlabel="time of training (s)")
        by_step.legend(fontsize=8)
        if task == "language":  # untrained models are far above what matters
            by_step.set_ylim(top=max(run["history"][1][2] for runs in kinds.values() for run in runs))
        figure.suptitle(f"{task}: every line is a seed", fontsize=10)
        figure.tight_layout()
        figure.savefig(folder / f"quality_{task}.png")


# ----------------------------------------------------------------------------------------------------------------


def make_parser():
    parser = argparse.ArgumentParser(description="Measures the paper's claims; without a subcommand a quick version of all.")
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there, too")
    shared.add_argument("--plot", type=Path, nargs="?", const=Path("assets"), metavar="FOLDER",
                        help="write pictures there (needs matplotlib); without a FOLDER to assets")
    shared.add_argument("--data", help="a folder, a .txt or a .jsonl; '' is the standard library")
    parts = parser.add_subparsers(dest="part")
    s = parts.add_parser("speed", parents=[shared], help="time and memory", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    s.add_argument("--context-lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 16384], help="tokens a row")
    s.add_argument("--mean-lengths", type=int, nargs="+", default=[600, 30, 6000], help="tokens a document, unless --data")
    s.add_argument("--repeats", type=int, default=5, help="timed runs of each case")
    s.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"),
                   help="where")
    s.add_argument("--dtype", default="bfloat16" if torch.cuda.is_available() else "float32", help="of attention alone")
    s.add_argument("--model", metavar="FOLDER", help="time the training step of a Hugging Face model instead")
    s.add_argument("--full-up-to", type=int, default=131072 if torch.cuda.is_available() else 16384,
                   help="longest context for full attention")
    s.add_argument("--mask-up-to", type=int, default=8192, help="longest context for the dense mask")
    s.add_argument("--flex", action="store_true", help="FlexAttention, too, forward alone; compiling takes minutes on a CPU")
    s.add_argument("--no-step", dest="step", action="store_false", help="leave the training step out")
    s.add_argument("--no-memory", action="store_true", help="leave peak memory out")
    r = parts.add_parser("rope", parents=[shared], help="precision", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    r.add_argument("--context-lengths", type=int, nargs="+", default=[128, 256, 512, 1024, 2048], help="tokens a row")
    r.add_argument("--checkpoint", help="a checkpoint of train.py, instead of random q and k")
    r.add_argument("--model", metavar="FOLDER", help="a Hugging Face causal language model with RoPE, the whole of it")
    q = parts.add_parser("quality", parents=[shared], help="what each kind learns",
                         formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    q.add_argument("--seeds", type=int, default=3, help="runs of each kind")
    q.add_argument("--steps", type=int, default=500, help="of language modelling; 0 leaves it out")
    q.add_argument("--context-length", type=int, default=2048, help="tokens a row of language modelling")
    q.add_argument("--short-length", type=int, default=256, help="tokens of the documents that recall is learned on")
    q.add_argument("--short-steps", type=int, default=300, help="of that")
    q.add_argument("--recall-length", type=int, default=2048, help="tokens a row when each kind continues")
    q.add_argument("--recall-steps", type=int, default=40, help="of that; 0 leaves the recall task out")
    q.add_argument("--facts", type=int, default=1, help="facts a recall document; 1 is the passkey task")
    parser.set_defaults(json=None, plot=None)
    return parser


def main(argv=None):
    parser = make_parser()
    args = parser.parse_args(argv)
    print(f"PyTorch {torch.__version__}, {torch.get_num_threads()} threads"
          + (f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""))
    quick = {"speed": "--context-lengths 1024 8192 --mean-lengths 600 --repeats 2", "rope": "--context-lengths 128 512",
             "quality": "--seeds 1 --steps 0 --short-length 128 --short-steps 200 --recall-length 512 --recall-steps 16"}
    results = {}
    try:
        for part, run, plot in (("speed", speed, plot_speed), ("rope", rope, plot_rope), ("quality", quality, plot_quality)):
            if args.part in (None, part):
                results[part] = run(args if args.part else parser.parse_args([part, *quick[part].split()]))
                if args.plot:
                    args.plot.mkdir(exist_ok=True)
                    plot(results[part], args.plot)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    if args.json:
        args.json.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
