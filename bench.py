"""The paper's claims, measured on this machine.

    python bench.py                       # a quick version of the three claims
    python bench.py speed                 # anchor attention halves the training time: time, memory, the limit
    python bench.py rope                  # bfloat16 breaks RoPE: where exactly, and by how much
    python bench.py quality               # anchor attention trains a better long-context model
    python bench.py rope --checkpoint out/checkpoint.pt --plot assets
    python bench.py profile               # what a training step spends its time on

Every time is the median of runs that take turns (A B C A B C ...) after a warm-up, and every ratio is of two
medians of the same series, since machines are noisy. Peak memory is CUDA's counter, or on a CPU the peak of a
process of its own.
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
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Callable, NamedTuple

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.profiler import ProfilerActivity
from tqdm import tqdm

import train
from anchor_gpt import (ATTENTIONS, GPT, GPTConfig, PreparedAttention, anchor_attention, apply_rope,
                        check_plain_attention, document_lengths, rope_cos_sin, visible_pairs)
from data import (BOS, NO_TARGET, SERVED, PackedRows, encode, load_documents, recall_batch, split_documents,
                  visible_share)


def print_table(title, header, rows):
    """Columns aligned: the first to the left, the others to the right."""
    cells = [header] + [[str(x) for x in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells)]
    cells.insert(1, ["-" * width for width in widths])
    print(f"\n{title}\n")
    for first, *others in cells:
        aligned = [first.ljust(widths[0])] + [x.rjust(width) for x, width in zip(others, widths[1:])]
        print("  ".join(aligned).rstrip())


# ------------------------------------------------------------------------------------------------------------
# Speed: what is timed


def log_normal_doc_ids(context_length, mean_length, seed):
    """doc_ids (1, T) of documents of log-normal lengths (sigma 1) with a mean of mean_length tokens."""
    lengths = np.random.default_rng(seed).lognormal(math.log(mean_length) - 0.5, size=context_length)
    lengths = np.maximum(1, lengths.round().astype(int))
    lengths = lengths[:np.searchsorted(lengths.cumsum(), context_length - 1) + 1]  # as many as fill the row
    doc_ids = np.repeat(np.arange(1, len(lengths) + 1), lengths)[:context_length - 1]
    return torch.from_numpy(np.insert(doc_ids, 0, 0))[None]


def prepare_flex(doc_ids, attention, device):
    """PyTorch's FlexAttention, compiled, as the official code has it."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    ids, T = doc_ids[0].to(device), doc_ids.shape[1]

    def visible(b, h, i, j):
        return (j <= i) & ((ids[i] == ids[j]) | (j == 0))
    compiled = device != "cpu"  # uncompiled it needs T x T
    mask = create_block_mask(visible, 1, None, T, T, device=device, _compile=compiled)
    return partial(torch.compile(flex_attention, dynamic=False), block_mask=mask)


def prepare_varlen(doc_ids, attention, device):
    """PyTorch's variable-length kernel (CUDA, 16 bit), on a row with its copies of the anchor in it."""
    from torch.nn.attention.varlen import varlen_attn
    row = doc_ids[0].numpy()
    starts = np.flatnonzero(np.diff(row))[1:] + 1  # of the second document, the third, ...
    order = np.insert(np.arange(len(row)), starts, 0)  # the row, an anchor in front of each
    ends = np.append(starts + np.arange(len(starts)), len(order))
    kept = torch.from_numpy(np.delete(np.arange(len(order)), ends[:-1])).to(device)  # all but the copies
    order = torch.from_numpy(order).to(device)
    cumulative = torch.from_numpy(np.insert(ends, 0, 0)).to(device, torch.int32)
    longest = int(np.diff(ends, prepend=0).max())

    def attend(q, k, v):
        q, k, v = (x[0].transpose(0, 1)[order] for x in (q, k, v))  # (T + copies, H, D)
        y = varlen_attn(q, k, v, cumulative, cumulative, longest, longest, window_size=(-1, 0))
        return y[kept].transpose(0, 1)[None]
    return attend


class PlainGPT(nn.Module):
    """The yardstick, a GPT as nanoGPT has it: learned positions, LayerNorm, GELU, full attention."""

    def __init__(self, config):
        super().__init__()
        self.config, C = config, config.n_embd
        norm, linear = partial(nn.LayerNorm, bias=False), partial(nn.Linear, bias=False)
        self.embedding = nn.Embedding(config.vocab_size, C)
        self.positions = nn.Embedding(config.context_length, C)
        self.blocks = nn.ModuleList(nn.ModuleDict({
            "norm": norm(C), "qkv": linear(C, 3 * C), "proj": linear(C, C),
            "mlp": nn.Sequential(norm(C), linear(C, 4 * C), nn.GELU(), linear(4 * C, C)),
        }) for _ in range(config.n_layer))
        self.norm, self.head = norm(C), linear(C, config.vocab_size)
        self.head.weight = self.embedding.weight

    def forward(self, tokens, doc_ids, targets):
        x = self.embedding(tokens) + self.positions.weight[:tokens.shape[1]]
        for block in self.blocks:
            qkv = block["qkv"](block["norm"](x)).unflatten(2, (3, self.config.n_head, -1))
            q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (B, H, T, D)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + block["proj"](y.transpose(1, 2).flatten(2))
            x = x + block["mlp"](x)
        return next_token_loss(self.head(self.norm(x)), targets)


def next_token_loss(logits, targets):
    loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=NO_TARGET)
    return logits, loss


class Case(NamedTuple):
    """A row of a table of speed: attention alone, or a training step of train.py's default model."""
    attention: str  # the kind
    limit: str = ""  # whose longest context it keeps to: "full" or "mask"
    needs: str = ""  # what has to be wanted, or there: "flex", "varlen", "compile", or a dtype
    against: str = "full"  # the row that its speed is relative to
    dash: str = "-"  # of its line in the picture; its colour is the attention kind's
    # attention alone
    prepare: Callable = PreparedAttention  # (doc_ids, attention, device=device) -> attend(q, k, v)
    backward: bool = True
    # a training step
    model: type = GPT
    checkpointed: bool = False
    dtype: str = ""


HEADS = (6, 64)  # of attention alone: heads and their size
CASES = {
    "full": Case("full", "full"),
    "intra_doc": Case("intra_doc"),
    "anchor": Case("anchor"),
    "anchor by mask": Case("anchor", "mask", dash="--", prepare=partial(PreparedAttention, attend="mask")),
    "anchor by varlen": Case("anchor", needs="varlen", dash="-.", prepare=prepare_varlen),
    "full, forward": Case("full", "full", "flex", "full, forward", ":", backward=False),
    "anchor, forward": Case("anchor", "", "flex", "full, forward", ":", backward=False),
    "anchor by flex, forward": Case("anchor", "", "flex", "full, forward", "-.", prepare_flex, False),
}
STEPS = {
    "full": Case("full", "full"),
    "intra_doc": Case("intra_doc"),
    "anchor": Case("anchor"),
    "anchor, checkpointed": Case("anchor", checkpointed=True, dash=":"),
    "anchor, float32": Case("anchor", needs="float32", dash="-.", dtype="float32"),
    "anchor, bfloat16": Case("anchor", needs="bfloat16", dash="-.", dtype="bfloat16"),
    "plain GPT": Case("full", "full", model=PlainGPT),
    "full, compiled": Case("full", "full", "compile", dash="--"),
    "anchor, compiled": Case("anchor", needs="compile", dash="--"),
    "plain GPT, compiled": Case("full", "full", "compile", dash="--", model=PlainGPT),
}


class Run(NamedTuple):
    """A row of a table of speed, ready to be timed."""
    case: Case
    run: Callable  # -> seconds
    flops: float
    dtype: str


def attention_run(name, doc_ids, device, dtype):
    """Attention on fresh inputs. What a model works out once a forward, not once a layer, is not timed."""
    case = CASES[name]
    attend = case.prepare(doc_ids, case.attention, device=device)

    def run():
        shape, kind = (1, doc_ids.shape[1], *HEADS), dict(device=device, dtype=getattr(torch, dtype))
        q, k, v, g = (torch.randn(shape, **kind).transpose(1, 2) for _ in range(4))
        for x in (q, k, v):
            x.requires_grad_(case.backward)
        began = now(device)
        y = attend(q, k, v)
        if case.backward:
            torch.autograd.grad(y, (q, k, v), g)
        return now(device) - began
    return Run(case, run, attention_flops(doc_ids, case.attention, math.prod(HEADS), case.backward), dtype)


def make_step(name, context_length, device):
    """-> train.py's default model or the yardstick of its width and depth, its optimizer, its dtype"""
    step, settings = STEPS[name], train.default_settings(device)
    config = replace(train.model_config(settings), attention=step.attention, context_length=context_length,
                     checkpoint_activations=step.checkpointed)
    torch.manual_seed(0)
    model = step.model(config).to(device)
    optimizer = train.make_optimizer(model, settings["weight_decay"])
    if step.needs == "compile":
        model = torch.compile(model)
    return model, optimizer, step.dtype or settings["dtype"]


def step_run(step, doc_ids, device):
    """One training step (forward, backward, optimizer) on a row of random tokens -> seconds."""
    model, optimizer, dtype = step
    tokens = torch.randint(256, doc_ids.shape)
    batch = (tokens, doc_ids, tokens.roll(-1, dims=1))
    began = now(device)
    train.train_step(model, optimizer, [batch], 1e-4, 1.0, dtype)
    return now(device) - began


def timed_step(case, step, doc_ids, device, width):
    """A training step of a model whose attention has a width (head size x heads x layers) as a Run."""
    model, _, dtype = step
    flops = matrix_flops(model, doc_ids.numel()) + attention_flops(doc_ids, case.attention, width)
    return Run(case, partial(step_run, step, doc_ids, device), flops, dtype)


def training_run(name, doc_ids, device, dtype=None):
    """A training step of train.py's default model or the yardstick, in its own dtype."""
    step = make_step(name, doc_ids.shape[1], device)
    config = step[0].config
    return timed_step(STEPS[name], step, doc_ids, device, config.n_embd * config.n_layer)


KINDS = {"attention": (CASES, attention_run), "training step": (STEPS, training_run)}


# ------------------------------------------------------------------------------------------------------------
# Speed: time, memory and the limit


def now(device):
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter()


@cache
def limit(dtype, device):
    """Floating-point operations a second of a large torch.mm, the best of four: once a run, and printed."""
    for n in (256, 2048):
        matrix = torch.randn(n, n, device=device).to(getattr(torch, dtype))
        seconds = []
        for _ in range(4):
            began = now(device)
            torch.mm(matrix, matrix)
            seconds.append(now(device) - began)
        rate = 2 * n**3 / min(seconds)
        if rate < 1e9:
            break  # no instructions for this dtype: the large one would take minutes
    print(f"the limit here: torch.mm of {n:,} x {n:,} in {dtype} does {rate / 1e9:,.0f} GFLOP/s")
    return rate


def attention_flops(doc_ids, attention, width, backward=True):
    """The floating-point operations of attention over visible pairs; width: heads x their size (x layers).

    Forward two products, q k and weights v: 4 x pairs x width. Backward five, since the fused kernels compute
    q k again: 2.5 times that."""
    return 4 * int(visible_pairs(doc_ids, attention).sum()) * width * (3.5 if backward else 1)


def matrix_flops(model, n_tokens):
    """The floating-point operations of a training step's linear layers, the output head included: for a token
    and a weight 2 forward and 4 backward. What checkpointing computes again is not counted, here or above."""
    return 6 * n_tokens * sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))


def take_turns(runs, repeats, what):
    """{name: function -> seconds} -> {name: [seconds, ...]}, after one warm-up of each."""
    seconds = {name: [] for name in runs}
    for _ in tqdm(range(repeats + 1), desc=what, leave=False, disable=None):
        for name, run in runs.items():
            seconds[name].append(run())
    return {name: times[1:] for name, times in seconds.items()}


def peak_of_this_process(kind, name, doc_ids, device, dtype):
    before = torch.cuda.memory_allocated()  # by what was timed; 0 without CUDA
    _, make = KINDS[kind]
    run = make(name, doc_ids, device, dtype).run
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


def summarize(kind, what, source, doc_ids, runs, args):
    """Times the runs, prints their table and returns it as a list of dicts."""
    T = doc_ids.shape[1]
    seconds = take_turns({name: run.run for name, run in runs.items()}, args.repeats, f"{kind} at {T:,}")
    median = {name: statistics.median(times) for name, times in seconds.items()}
    table = []
    for name, (case, _, flops, dtype) in runs.items():
        own, base = median[name], median.get(case.against)
        share = visible_share(doc_ids, case.attention)
        # A pretrained model is not loaded again, and a compiler's memory is not the step's.
        measured = not args.no_memory and not args.model and case.needs != "compile"
        table.append({
            "kind": kind, "source": source, "context_length": T, "case": name,
            "visible": share,
            "seconds": own,
            "spread": (max(seconds[name]) - min(seconds[name])) / own,
            "times_faster": base and base / own,
            "cost_per_visible_pair": base and own / base / share,
            "tokens_per_second": T / own,
            "share_of_limit": flops / own / limit(dtype, args.device),
            "peak_mib": peak_memory(kind, name, doc_ids, args.device, dtype) if measured else None})
    print_table(f"{kind}, {what}; {T:,} tokens, {int(doc_ids.max()):,} {source}",
                ["", "visible", "median ms", "spread", "x full", "cost a visible pair", "tokens/s",
                 "of the limit", "peak MiB"],
                [[r["case"], f"{r['visible']:.1%}", f"{1e3 * r['seconds']:,.1f}", f"{r['spread']:.0%}",
                  *(f"{r[x]:.2f}" if r[x] else "-" for x in ("times_faster", "cost_per_visible_pair")),
                  f"{r['tokens_per_second']:,.0f}", f"{r['share_of_limit']:.1%}",
                  f"{r['peak_mib']:,.0f}" if r["peak_mib"] else "-"] for r in table])
    return table


def those_that_run(cases, T, args):
    """The names of the cases that keep to their limit at this length and have what they need."""
    longest = {"": T, "full": args.full_up_to, "mask": args.mask_up_to}
    there = {"", *(flag for flag in ("flex", "compile") if getattr(args, flag))}
    if args.device != "cpu" and args.dtype == "bfloat16" and torch.__version__ >= (2, 11):
        there.add("varlen")  # before 2.11 it had another signature
    default = train.default_settings(args.device)["dtype"]
    other = "float32" if default == "bfloat16" else "bfloat16"
    if limit(other, args.device) > 0.05 * limit(default, args.device):
        there.add(other)  # without instructions for it, a step in bfloat16 takes minutes
    return [name for name, case in cases.items() if T <= longest[case.limit] and case.needs in there]


def row_of_documents(context_length, mean_length, data):
    """-> (what the documents are, doc_ids (1, T)): of a corpus (data: a path) or of log-normal lengths."""
    if data is None:
        doc_ids = log_normal_doc_ids(context_length, mean_length, seed=0)
        return f"log-normal documents of {mean_length:,} tokens on average", doc_ids
    rows = PackedRows(load_documents(data or None), context_length, seed=0)
    return f"documents of {data or 'the standard library'}", rows.shuffled_batch(0, 1)[1]


def speed(args):
    pretrained = pretrained_steps(args) if args.model else None
    results = []
    for mean_length in [None] if args.data is not None else args.mean_lengths:
        for T in args.context_lengths:
            source, doc_ids = row_of_documents(T, mean_length, args.data)
            torch.compiler.reset()  # else, after a few lengths, nothing would be compiled any more
            if pretrained:
                runs = pretrained_runs(pretrained, doc_ids, args.device)
                results += summarize("training step", Path(args.model).name, source, doc_ids, runs, args)
                continue
            for kind, (cases, make) in KINDS.items():
                if kind == "training step" and not args.step:
                    continue
                names = those_that_run(cases, T, args)
                runs = {name: make(name, doc_ids, args.device, args.dtype) for name in names}
                what = {"attention": f"{HEADS[0]} heads of {HEADS[1]}, {args.dtype}, forward + backward",
                        "training step": "train.py's default model and dtype"}[kind]
                results += summarize(kind, what, source, doc_ids, runs, args)
    return results


# ------------------------------------------------------------------------------------------------------------
# Profile: where a training step's time goes

GROUPS = {  # an operation belongs to the first group whose pattern is in its name
    "attention, backward": r"(?i)attention.*backward",
    "attention, forward": r"(?i)attention",
    "matrix products": r"aten::(mm|addmm|bmm|matmul|linear)$",
    "fused by the compiler": r"triton|cpp_fused|CompiledFxGraph",
    "optimizer": r"(?i)optimizer|adam|_foreach_|vector_norm",
    "copies and casts": r"aten::(cat|to|_to_copy|copy_|clone|contiguous|fill_|zero_|zeros|slice_backward)$",
    "elementwise and norms": r"aten::_?(add|sub|mul|div|neg|pow|sum|mean|rsqrt|cos|sin|silu|gelu|log_softmax"
                             r"|nll_loss|fused_rms_norm|rms_norm|native_layer_norm|layer_norm)",
    "everything else": "",
}


def time_by_group(events, device):
    """The events of a profile, key_averages() -> {group: ms of their own, without what they call}."""
    times = dict.fromkeys(GROUPS, 0.0)
    for event in events:
        group = next(name for name, pattern in GROUPS.items() if re.search(pattern, event.key))
        if device == "cpu":
            times[group] += event.self_cpu_time_total / 1e3
        elif event.device_type == torch.autograd.DeviceType.CPU:  # a kernel's time is also its operation's
            times[group] += event.self_device_time_total / 1e3
    return times


def profile_step(step, doc_ids, device, repeats):
    """-> {group: ms a training step}, after a warm-up."""
    step_run(step, doc_ids, device)
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device != "cpu")
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(repeats):
            step_run(step, doc_ids, device)
    return {group: ms / repeats for group, ms in time_by_group(profiler.key_averages(), device).items()}


def profile(args):
    results = {}
    for T in args.context_lengths:
        doc_ids = log_normal_doc_ids(T, 600, seed=0)
        torch.compiler.reset()
        for name, how in (("anchor", "eager"), ("anchor, compiled", "compiled")):
            if args.compile or how == "eager":
                step = make_step(name, T, args.device)
                results[f"{T:,} {how}"] = profile_step(step, doc_ids, args.device, args.repeats)
    whole = {column: sum(groups.values()) for column, groups in results.items()}
    shares = [[group, *(f"{groups[group]:,.1f} ms {groups[group] / whole[column]:>6.1%}"
                        for column, groups in results.items())] for group in GROUPS]
    print_table("a training step of anchor attention, train.py's default model and dtype, documents of 600 "
                "tokens on average", ["", *results],
                [*shares, ["whole", *(f"{ms:,.1f} ms 100.0%" for ms in whole.values())]])
    return results


# ------------------------------------------------------------------------------------------------------------
# RoPE in limited precision


class Precision(NamedTuple):
    """The dtypes of q and k before their rotation, of the angles, the cos and sin tables, and the result."""
    storage: torch.dtype
    angles: torch.dtype
    tables: torch.dtype
    result: torch.dtype


FLOAT64, FLOAT32, BFLOAT16 = torch.float64, torch.float32, torch.bfloat16
PRECISIONS = {
    "float64": Precision(FLOAT64, FLOAT64, FLOAT64, FLOAT64),
    "float32 throughout": Precision(FLOAT32, FLOAT64, FLOAT32, FLOAT32),
    "bfloat16 in, float32 out (short documents on a CPU)": Precision(BFLOAT16, FLOAT64, FLOAT32, FLOAT32),
    "float32 angles": Precision(FLOAT32, FLOAT32, FLOAT32, FLOAT32),
    "bfloat16 q and k": Precision(BFLOAT16, FLOAT64, FLOAT32, BFLOAT16),
    "bfloat16 tables, too (the paper)": Precision(BFLOAT16, FLOAT64, BFLOAT16, BFLOAT16),
    "bfloat16 angles, too": Precision(BFLOAT16, BFLOAT16, BFLOAT16, BFLOAT16),
}
PAPER = "bfloat16 tables, too (the paper)"


def rotate(x, positions, precision, theta=10_000.0):
    """x (H, T, D) rotated to positions (T,) in a precision -> float64 (H, T, D) of what is left of it."""
    storage, angles, tables, result = PRECISIONS[precision]
    if angles == torch.float64:
        cos, sin = rope_cos_sin(positions[None], x.shape[-1], theta, tables)
    else:  # the bugs that rope_cos_sin avoids
        frequencies = theta ** -(torch.arange(0, x.shape[-1], 2).double() / x.shape[-1])
        angle = (positions.to(angles)[:, None] * frequencies.to(angles))[None, None]
        cos, sin = angle.cos().to(tables), angle.sin().to(tables)
    return apply_rope(x.to(storage)[None], cos, sin, result)[0].double()


def logits_and_weights(q, k, positions, precision):
    """Causal attention of q and k (H, T, D) at positions (T,), else in float64 -> two (H, T, T)."""
    q, k = (rotate(x, positions, precision) for x in (q, k))
    logits = q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])
    hidden = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
    return logits.masked_fill(hidden, 0.0), logits.masked_fill(hidden, -math.inf).softmax(dim=-1)


def change_by_shift(q, k, shift, precision):
    """What a shift of all positions changes, where exact arithmetic changes nothing.

    -> (root mean square change of a visible logit, |change of the weights| summed over heads and queries
    (T,): the paper's D is its sum, entry j the share of key j, weight of each key summed likewise (T,)).
    """
    T = q.shape[1]
    logits, weights = logits_and_weights(q, k, torch.arange(T), precision)
    moved_logits, moved_weights = logits_and_weights(q, k, torch.arange(T) + shift, precision)
    pairs = q.shape[0] * T * (T + 1) / 2
    change = ((logits - moved_logits).square().sum() / pairs).sqrt().item()
    return change, (weights - moved_weights).abs().sum(dim=(0, 1)), weights.sum(dim=(0, 1))


def logit_error(position, precision, distance=100, n=256, head_dim=64):
    """The error of a logit at a position: root mean square of n pairs of unit vectors `distance` apart."""
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(2, n, 1, head_dim, generator=generator, dtype=torch.float64)
    rounded = F.normalize(vectors, dim=-1).to(PRECISIONS[precision].storage)  # nobody's rotation is to blame
    q, k = rounded.double()

    def logit(name):
        at_query, at_key = torch.tensor([position + distance]), torch.tensor([position])
        return (rotate(q, at_query, name) * rotate(k, at_key, name)).sum(dim=-1)
    return (logit(precision) - logit("float64")).square().mean().sqrt().item()


def model_qk(checkpoint, context_length, data):
    """q and k before their rotation on a held-out document -> [(q, k), ...] a layer, (H, T, D) float64."""
    saved = train.load_checkpoint(Path(checkpoint))
    settings = train.default_settings("cpu") | saved["settings"]
    config = replace(train.model_config(settings), attention="full")
    model = GPT(config)
    model.load_state_dict(saved["model"])
    _, held_out = split_documents(load_documents(data or None), settings["val_fraction"], seed=0)
    document = max(held_out, key=len)
    if len(document) < context_length:
        raise ValueError(f"the longest held-out document has {len(document)} bytes, expected {context_length}"
                         ": lower --context-lengths or name another --data")
    outputs = []
    for block in model.blocks:
        block.attention.qkv.register_forward_hook(lambda module, args, output: outputs.append(output[0]))
    with torch.no_grad():
        model(torch.tensor([[BOS] + encode(document[:context_length - 1])]))
    H, H_kv = config.n_head, config.n_kv_head
    layers = []
    for output in outputs:  # (T, (H + 2 H_kv) D)
        q, k, _ = output.double().unflatten(1, (H + 2 * H_kv, -1)).transpose(0, 1).split((H, H_kv, H_kv))
        layers.append((q, k.repeat_interleave(H // H_kv, dim=0)))
    return layers


def print_points(title, corner, results, column=1, form="{:.1e}", heading="{:,}"):
    """Prints {name: [(x, ...), ...]} as a table, a column for each x; column: which of the ... is shown."""
    heads = [heading.format(point[0]) for point in next(iter(results.values()))]
    rows = [[name, *(form.format(point[column]) for point in points)] for name, points in results.items()]
    print_table(title, [corner, *heads], rows)


def error_by_position():
    """-> {precision: [(position, error of a logit), ...]}"""
    results = {name: [(2**i, logit_error(2**i, name)) for i in range(18)] for name in PRECISIONS}
    some = {name: points[::4] + points[-1:] for name, points in results.items()}
    print_points("error of a logit of unit vectors (spread 0.125) at a position, root mean square",
                 "precision", some)
    return results


def change_by_size_of_shift(layers, source, T):
    """-> {precision: [(shift, change of a logit, of a query's weights), ...]}, the mean of the layers"""
    results = {}
    for name in tqdm(PRECISIONS, desc="change by shift", leave=False, disable=None):
        results[name] = []
        for shift in (1, 16, 256, 4096, 65536):
            changes = [change_by_shift(q[:, :T], k[:, :T], shift, name) for q, k in layers]
            logits = math.sqrt(statistics.mean(logit**2 for logit, _, _ in changes))
            weights = statistics.mean(changed.sum().item() for _, changed, _ in changes)
            results[name].append((shift, logits, weights / layers[0][0].shape[0] / T))
    where = f"when all positions shift; {T} tokens; {source}"
    print_points(f"change of a logit, root mean square, {where}", "precision", results, 1, heading="{:+,}")
    print_points(f"summed |change| of a query's weights (at most 2), {where}", "precision", results, 2,
                 heading="{:+,}")
    return results


D_TITLE = "D, the summed |change| of all attention weights when all positions shift by 16; "


def D_by_context_length(layers, source, context_lengths):
    """-> {precision: [(context length, D), ...]}"""
    results = {}
    for name in tqdm(list(PRECISIONS)[1:], desc="D by context length", leave=False, disable=None):
        results[name] = []
        for T in context_lengths:
            changes = [change_by_shift(q[:, :T], k[:, :T], 16, name)[1] for q, k in layers]
            results[name].append((T, sum(changed.sum().item() for changed in changes)))
    print_points(D_TITLE + source, "precision", results, form="{:,.3g}")
    return results


def print_shares(what, layers):
    """[(layer, |change| a key (T,), weight a key (T,)), ...] -> {layer: (share of D, of the weights)}"""
    rows, results = [], {}
    for name, changed, mass in layers:
        share, held = changed / changed.sum(), mass / mass.sum()
        results[name] = share.tolist(), held.tolist()
        rows.append([name, f"{changed.sum():,.1f}", f"{share[0]:.2%}", f"{held[0]:.2%}",
                     f"{2 / (len(share) + 1):.2%}", f"{share[0] / held[0].clamp(min=1e-12):.2f}"])
    print_table(f"the first token's share of D; {what}",
                ["", "D", "of D", "of the weights", "fair share", "D / weights"], rows)
    return results


def share_by_key(layers, source):
    """-> {layer: (share of D a key, share of the weights a key)} in the paper's case."""
    changes = [(f"layer {i}", *change_by_shift(q, k, 16, PAPER)[1:]) for i, (q, k) in enumerate(layers)]
    return print_shares(f"{PAPER}; {layers[0][0].shape[1]:,} tokens; {source}", changes)


def error_of_first_key(k):
    """k (H, T, D) -> {precision: [(position, relative error of the first token's key there), ...]}"""
    results = {}
    for name, precision in PRECISIONS.items():
        key = k[:, :1].to(precision.storage).double()
        results[name] = []
        for position in (0, 16, 4096):
            moved = [rotate(key, torch.tensor([position]), how) for how in (name, "float64")]
            results[name].append((position, ((moved[0] - moved[1]).norm() / key.norm()).item()))
    print_table("relative error of the first token's rotated key: exact at 0, where the anchor always is",
                ["precision", "at 0 (anchor)", "at 16", "at 4,096"],
                [[name, *(f"{error:.1e}" for _, error in row)] for name, row in results.items()])
    return results


def again_and_again(anchor, n):
    return [anchor] * n


def from_one_expand(anchor, n):
    return anchor.expand(-1, -1, -1, n, -1).split(1, dim=3)


def attend_with_copies(copies_of, q, k, v, lengths):
    """Anchor attention of one row, in the dtype of its inputs throughout, as on a GPU."""
    anchor, *docs = torch.stack((q, k, v)).split(lengths, dim=3)  # each (3, 1, H, n, D)
    outputs = [anchor[2]]  # the anchor sees itself alone
    for copy, doc in zip(copies_of(anchor, len(docs)), docs):
        block = torch.cat((copy, doc), dim=3)
        outputs.append(F.scaled_dot_product_attention(*block, is_causal=True)[:, :, 1:])
    return torch.cat(outputs, dim=2)


def error_of_the_anchors_gradient():
    """What becomes of a gradient that is a sum over all documents, of the anchor's k and v, in bfloat16.

    -> {documents: [(how they are added up, the larger of the two relative errors), ...]}
    """
    results = {}
    for n_documents, length in ((16, 8), (512, 8), (273, 30)):
        doc_ids = torch.arange(1, n_documents + 1).repeat_interleave(length)
        doc_ids = F.pad(doc_ids, (1, 0))[None]
        lengths = document_lengths(doc_ids)[0]
        generator = torch.Generator().manual_seed(0)
        shape = (4, 1, 2, doc_ids.shape[1], 64)
        *inputs, weights = torch.randn(shape, generator=generator).bfloat16()

        def gradients(attend, dtype):
            q, k, v = (x.to(dtype).requires_grad_() for x in inputs)
            y = attend(q, k, v)
            return torch.autograd.grad((y * weights.to(dtype)).sum(), (k, v))
        by_mask = PreparedAttention(doc_ids, "anchor", "mask")
        exact = gradients(by_mask, torch.float64)
        ways = {"the anchor again and again": partial(attend_with_copies, again_and_again, lengths=lengths),
                "by mask": by_mask,
                "copies from one expand": partial(attend_with_copies, from_one_expand, lengths=lengths),
                "by document, on this device": PreparedAttention(doc_ids, "anchor")}
        errors = []
        for name, attend in ways.items():
            pairs = zip(gradients(attend, torch.bfloat16), exact)
            errors.append((name, max(((got - right)[:, :, 0].norm() / right[:, :, 0].norm()).item()
                                     for got, right in pairs)))
        results[f"{n_documents} of {length} tokens"] = errors
    print_table("error of the gradient of the anchor's k and v, a sum over all documents, in bfloat16",
                ["documents", *(name for name, _ in errors)],
                [[name, *(f"{error:.2%}" for _, error in row)] for name, row in results.items()])
    return results


def rope(args):
    if args.model:
        return rope_of_model(args)
    longest = max(args.context_lengths)
    if args.checkpoint:
        layers = model_qk(args.checkpoint, longest, args.data)
        source, suffix = f"{args.checkpoint}, a held-out document", "_checkpoint"
    else:
        generator = torch.Generator().manual_seed(0)
        layers = [torch.randn(2, 4, longest, 64, generator=generator, dtype=torch.float64).unbind()]
        source, suffix = "random q and k, 4 heads of 64", ""
    shift_length = min(512, longest)
    return {"source": source, "suffix": suffix, "shift_length": shift_length,
            "error": error_by_position(),
            "shift": change_by_size_of_shift(layers, source, shift_length),
            "context": D_by_context_length(layers, source, args.context_lengths),
            "share": share_by_key(layers, source),
            "first_key": error_of_first_key(layers[0][1]),
            "anchors_gradient": error_of_the_anchors_gradient()}


# ------------------------------------------------------------------------------------------------------------
# Quality


def definitions(documents):
    """Each function or method of Python files as a document: short ones, many to a row."""
    return [d for document in documents for d in re.split(rb"\n(?= *(?:async )?def )", document) if d]


class Report(NamedTuple):
    step: int
    seconds: float  # of training until then
    value: float  # what was reported


def train_side_by_side(config, batch, steps, seed, report, dtype, learning_rate=1e-3, weights=None):
    """Trains one model of each attention kind from the same weights on the same batches, a step each in turn,
    so that a noisy machine is noisy for all of them alike.

    batch(step) -> (tokens, doc_ids, targets); report(model) -> a number, before the first step and eight
    times on the way; weights: a state_dict to start from, else fresh ones from the seed.
    -> {attention: ([Report, ...], model)}
    """
    runs = {}
    for attention in ATTENTIONS:
        torch.manual_seed(seed)
        model = GPT(replace(config, attention=attention))
        if weights:
            model.load_state_dict(weights)
        runs[attention] = [Report(0, 0.0, report(model))], model, train.make_optimizer(model, 0.1)
    seconds = dict.fromkeys(ATTENTIONS, 0.0)
    schedule = dict(learning_rate=learning_rate, warmup_steps=steps // 20, steps=steps)
    for step in tqdm(range(steps), desc=f"seed {seed}", leave=False, disable=None):
        data, rate = batch(step), train.learning_rate_at(step, schedule)
        for attention, (history, model, optimizer) in runs.items():
            began = time.perf_counter()
            train.train_step(model, optimizer, [data], rate, 1.0, dtype)
            seconds[attention] += time.perf_counter() - began
            if (step + 1) * 8 // steps > step * 8 // steps:
                history.append(Report(step + 1, seconds[attention], report(model)))
    return {attention: (history, model) for attention, (history, model, _) in runs.items()}


def at_time(history, seconds):
    """What a run reports at a time: between two reports a straight line."""
    _, times, values = np.array(history).T
    return float(np.interp(seconds, times, values))


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
    config = replace(train.model_config(train.default_settings("cpu")), context_length=T)
    results = {a: [] for a in ATTENTIONS}
    for seed in range(args.seeds):
        rows = PackedRows(short, T, seed)
        runs = train_side_by_side(config, lambda step: rows.shuffled_batch(step, 1), args.steps, seed,
                                  lambda model: train.evaluate(model, val_batch, 1, dtype)[0], dtype)
        shortest_time = min(history[-1].seconds for history, _ in runs.values())
        for attention, (history, model) in runs.items():
            results[attention].append({
                "history": history, "at_equal_time": at_time(history, shortest_time),
                # half of each of these documents is beyond the trained length
                "by_position": train.loss_by_position(model, held_out, 2 * T, dtype, max_documents=32)})
    losses, positions, doc_ids = [], [], rows.shuffled_batch(0, 64)[1]
    for attention, runs in results.items():
        _, seconds, nats = np.array([run["history"][-1] for run in runs]).T  # each (seeds,)
        by_position = np.array([run["by_position"] for run in runs])[:, :, 2]  # (seeds, ranges)
        losses.append([attention, f"{visible_share(doc_ids, attention):.1%}", spread(seconds, "{:.0f}"),
                       spread(nats), spread([run["at_equal_time"] for run in runs])])
        positions.append([attention, *(spread(column, "{:.2f}") for column in by_position.T)])
    print_table(f"language: {args.steps} steps of a row of {T:,} tokens, {len(short):,} functions as "
                f"documents, {args.seeds} seeds: mean (least-largest), nats a token",
                ["", "visible", "seconds", "held-out loss", "at equal time"], losses)
    ranges = [f"{first:,}-{last:,}" for first, last, _ in results["full"][0]["by_position"]]
    print_table("the same, by position in whole held-out files that are longer than twice the context",
                ["", *ranges], positions)
    return results


def recall_rate(model, length, depth, n_facts, dtype, n_documents=32):
    """The share of documents of this length whose question is answered right; guessing has 1 in 10."""
    right = []
    for i in range(0, n_documents, 8):
        tokens, doc_ids, targets = recall_batch(length, 8, n_facts, (7, length, i), depth, packed=False)
        with torch.no_grad(), train.autocast(model, dtype):
            right.append((model(tokens, doc_ids)[0].argmax(dim=-1) == targets)[targets != NO_TARGET])
    return torch.cat(right).double().mean().item()


def recall(args, dtype):
    """The paper's protocol in miniature: one model learns recall in short documents, one to a row; each kind
    continues from it on rows several times as long, with documents of all lengths packed into them."""
    short, T = args.short_length, args.recall_length
    config = GPTConfig(context_length=T, n_layer=2, n_head=2, n_kv_head=2, n_embd=128, n_hidden=344)
    results = {a: [] for a in ATTENTIONS}
    lengths, depths = (short, T // 2, T, 2 * T), (0.0, 0.5, 1.0)
    schedule = dict(learning_rate=3e-3, warmup_steps=10, steps=args.short_steps)

    def rate(model, length, depth=None):
        return recall_rate(model, length, depth, args.facts, dtype)
    for seed in range(args.seeds):
        torch.manual_seed(seed)
        base = GPT(replace(config, attention="full"))
        optimizer = train.make_optimizer(base, 0.1)
        what = f"seed {seed}, {short} tokens"
        for step in tqdm(range(args.short_steps), desc=what, leave=False, disable=None):
            batch = recall_batch(short, 32, args.facts, (seed, 0, step), packed=False)
            train.train_step(base, optimizer, [batch], train.learning_rate_at(step, schedule), 1.0, dtype)
        runs = train_side_by_side(config, lambda step: recall_batch(T, 4, args.facts, (seed, 1, step)),
                                  args.recall_steps, seed, lambda model: rate(model, T), dtype,
                                  weights=base.state_dict())
        for attention, (history, model) in runs.items():
            rates = [[rate(model, n, depth) for depth in depths] for n in lengths]
            results[attention].append({"short": rate(base, short), "history": history, "rates": rates})
    by_step, after = [], []
    for attention, runs in results.items():
        histories = np.array([run["history"] for run in runs])  # (seeds, reports, 3)
        rates = np.array([run["rates"] for run in runs]).reshape(args.seeds, -1)
        by_step.append([attention, spread(histories[:, -1, 1], "{:.0f}"),
                        *(spread(column, "{:.0%}") for column in histories[:, :, 2].T)])
        after.append([attention, *(spread(column, "{:.0%}") for column in rates.T)])
    known = spread([run["short"] for run in results["full"]], "{:.0%}")
    steps = [str(report.step) for report in results["full"][0]["history"]]
    print_table(f"recall of a fact among {args.facts} in {T:,} tokens by step on packed rows of {T:,}; all "
                f"kinds start from one model that had {args.short_steps} steps on {short} tokens and there "
                f"recalls {known}", ["", "seconds", *steps], by_step)
    tests = [f"{n:,} at {depth:.0%}" for n in lengths for depth in depths]
    print_table(f"the same after the last step, by context length ({2 * T:,} was never trained) and depth of "
                "the fact", ["", *tests], after)
    return results


def quality(args):
    dtype = train.default_settings("cpu")["dtype"]
    results = {}
    if args.steps:
        results["language"] = language(args, dtype)
    if args.recall_steps:
        results["recall"] = recall(args, dtype)
    return results


# ------------------------------------------------------------------------------------------------------------
# Pretrained models, of Hugging Face transformers


def load_model(folder, dtype=torch.float32):
    """-> a causal language model and its tokenizer."""
    try:
        from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer
    except ImportError:
        raise ValueError("--model needs transformers: pip install transformers") from None
    AttentionInterface.register("recording", recording_attention)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype), AutoTokenizer.from_pretrained(folder)


class PretrainedStep(nn.Module):
    """A pretrained model in the place of ours in train_step: full attention, or anchor with doc_ids."""

    def __init__(self, model, attention):
        super().__init__()
        self.model, self.attention = model, attention

    def forward(self, tokens, doc_ids, targets):
        anchor = self.attention == "anchor"
        self.model.set_attn_implementation("anchor" if anchor else "sdpa")
        logits = self.model(tokens, use_cache=False, **({"doc_ids": doc_ids} if anchor else {})).logits
        return next_token_loss(logits, targets)


def pretrained_steps(args):
    """-> {"full" and "anchor": (model, optimizer, dtype)}: one model and one optimizer for both."""
    settings = train.default_settings(args.device)
    model = anchor_attention(load_model(args.model)[0].to(args.device).train())
    optimizer = train.make_optimizer(model, settings["weight_decay"])
    return {kind: (PretrainedStep(model, kind), optimizer, settings["dtype"]) for kind in ("full", "anchor")}


def pretrained_runs(steps, doc_ids, device):
    config = steps["full"][0].model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    width = head_dim * config.num_attention_heads * config.num_hidden_layers
    return {kind: timed_step(STEPS[kind], step, doc_ids, device, width) for kind, step in steps.items()}


def recording_attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, record=None,
                        **options):
    """Full causal attention for transformers' AttentionInterface that appends its weights (H, T, T) to
    record, from q and k as they are rotated and rounded, all else in float64."""
    check_plain_attention(module, query, key, attention_mask, dropout, options)
    T, group = query.shape[2], query.shape[1] // key.shape[1]
    keys = key[0].double().repeat_interleave(group, dim=0)  # (H, T, D)
    logits = query[0].double() @ keys.transpose(1, 2) * (scaling or query.shape[3]**-0.5)
    hidden = torch.ones(T, T, dtype=torch.bool).triu(1)
    record.append(logits.masked_fill(hidden, -math.inf).softmax(dim=-1).float())
    y = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    return y.transpose(1, 2), None


def model_change_by_shift(model, tokens, shift):
    """A pretrained model's attention weights on tokens (1, T) when all positions shift -> [(|change| summed
    over heads and queries (T,), weight of each key summed likewise (T,)), ...] a layer. A layer's inputs have
    changed, too, by then: the change is that of the whole model, as in the paper's Figure 1."""
    model.set_attn_implementation("recording")
    before, after = [], []
    for start, record in ((0, before), (shift, after)):
        positions = torch.arange(tokens.shape[1])[None] + start
        with torch.no_grad():
            model(tokens, position_ids=positions, use_cache=False, record=record)
    return [((a - b).abs().sum(dim=(0, 1), dtype=torch.float64), a.sum(dim=(0, 1), dtype=torch.float64))
            for a, b in zip(before, after)]


def rope_of_model(args):
    name, longest = Path(args.model).name, max(args.context_lengths)
    text = max(load_documents(args.data or None)[:200], key=len).decode(errors="replace")[:20 * longest]
    context = {}
    for dtype in ("float32", "bfloat16"):
        # Not model.to(dtype), which would also round the rotation's frequencies.
        model, tokenizer = load_model(args.model, getattr(torch, dtype))
        model.eval()
        ids = tokenizer(text, add_special_tokens=False).input_ids
        if len(ids) < longest:
            raise ValueError(f"the text has {len(ids)} tokens, expected {longest}: lower --context-lengths "
                             "or name another --data")
        first = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        context[dtype] = []
        for T in tqdm(args.context_lengths, desc=dtype, leave=False, disable=None):
            layers = model_change_by_shift(model, torch.tensor([[first] + ids[:T - 1]]), 16)
            context[dtype].append((T, sum(changed.sum().item() for changed, _ in layers)))
    print_points(D_TITLE + name, "model in", context, form="{:,.3g}")
    everything = sum(changed for changed, _ in layers), sum(mass for _, mass in layers)
    named = [(f"layer {i}", *layer) for i, layer in enumerate(layers)] + [("all layers", *everything)]
    shares = print_shares(f"{name} in bfloat16; {T:,} tokens", named)
    share = {"all layers": shares["all layers"]}
    return {"source": name, "suffix": "_model", "context": context, "share": share}


# ------------------------------------------------------------------------------------------------------------
# Pictures

COLOURS = {"full": "#7f7f7f", "intra_doc": "#1f77b4", "intra_doc_reset": "#ff7f0e", "anchor": "#2ca02c"}
PLAIN = "black"  # the yardstick's: it is not one of the four kinds
WIDTHS = {"full": 1.2, "intra_doc": 5.5, "intra_doc_reset": 3.3, "anchor": 1.2}  # to see all that meet


def new_figure(rows):
    try:
        import matplotlib
    except ImportError:
        sys.exit("--plot needs matplotlib: pip install matplotlib")
    matplotlib.use("agg")
    import matplotlib.pyplot as plt
    from cycler import cycler
    plt.rcParams.update({"figure.dpi": 80, "font.size": 10, "axes.grid": True, "grid.alpha": 0.3,
                         "axes.prop_cycle": cycler(color=matplotlib.colormaps["Dark2"].colors)})
    return plt.subplots(rows, 2, figsize=(11, 4 * rows), squeeze=False)


def name_lines(axis):
    """Writes the lines' labels to the right of the panel, in the order in which the lines end."""
    lines = [line for line in axis.lines if not line.get_label().startswith("_")]
    ends = {line: axis.transData.transform(line.get_xydata()[-1]) for line in lines}  # in pixels
    lines.sort(key=lambda line: ends[line][1])
    heights = [ends[line][1] for line in lines]
    for i in range(1, len(heights)):
        heights[i] = max(heights[i], heights[i - 1] + 13)
    too_high = statistics.mean(height - ends[line][1] for line, height in zip(lines, heights))
    for line, height in zip(lines, heights):
        thin = {"arrowstyle": "-", "color": line.get_color(), "linewidth": 0.5}
        axis.annotate(line.get_label(), ends[line], (axis.bbox.x1 + 12, height - too_high), "figure pixels",
                      fontsize=8, color=line.get_color(), verticalalignment="center", arrowprops=thin)


def draw_precisions(axis, results, column, **labels):
    """Draws {precision: [(x, ...), ...]}; column: which of the ... it is."""
    for name, points in results.items():
        x, y = np.array(points)[:, [0, column]].T
        i = list(PRECISIONS).index(name) if name in PRECISIONS else list(results).index(name)
        axis.loglog(x, y, marker="o", markersize=4, label=name, color=f"C{i}",
                    linestyle=("--", "-")[i % 2], linewidth=(1.5, 3)[i % 2])  # some of them coincide
    axis.set_xscale("log", base=2)
    axis.set(**labels)


def draw_shares(axis, results):
    for i, (name, (changed, held)) in enumerate(results.items()):
        grey = str(0.8 * i / len(results))
        edges = np.unique(np.geomspace(1, len(changed) + 1, 60).round().astype(int))
        for shares, dash, what in ((changed, "-", "of D"), (held, ":", "of the weights")):
            means = np.add.reduceat(shares, edges[:-1] - 1) / np.diff(edges)  # over ever more keys
            axis.loglog(edges[:-1], means, dash, color=grey, label=f"{name}, share {what}")
    axis.set(xlabel="key (1 is the first token)", ylabel="share of a key", title="the paper's case")
    axis.legend(fontsize=7, ncols=2)


def plot_rope(results, folder):
    whole = "error" not in results  # a whole pretrained model has no table by position
    figure, axes = new_figure(1 if whole else 2)
    *above, (context, share) = axes
    for error, shift in above:
        draw_precisions(error, results["error"], 1, title="unit vectors, 100 tokens apart",
                        xlabel="position (tokens)", ylabel="error of a logit, RMS (logits: 0.125)")
        draw_precisions(shift, results["shift"], 2, title=f"{results['shift_length']:,} tokens",
                        xlabel="shift of all positions (tokens)", ylabel="summed |change|, a query's weights")
    draw_precisions(context, results["context"], 1, title="all positions shifted by 16",
                    xlabel="context length (tokens)", ylabel="D, summed |change| of all weights")
    draw_shares(share, results["share"])
    figure.suptitle(results["source"], fontsize=10)
    lines = axes[0][0].get_legend_handles_labels()
    figure.legend(*lines, loc="lower center", ncols=2, fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.06 if whole else 0.12, 1, 1))
    figure.savefig(folder / f"rope{results['suffix']}.png")


def plot_speed(results, folder):
    figure, axes = new_figure(1)
    source = results[0]["source"]
    for axis, (kind, cases) in zip(axes[0], {"attention": CASES, "training step": STEPS}.items()):
        rows = [row for row in results if row["kind"] == kind and row["source"] == source]
        for name, case in cases.items():
            points = [(row["context_length"], row["seconds"]) for row in rows if row["case"] == name]
            if points:
                plain = case.model is PlainGPT
                axis.loglog(*np.transpose(points), marker="o", markersize=3, linestyle=case.dash, label=name,
                            color=PLAIN if plain else COLOURS[case.attention])
        axis.set_xscale("log", base=2)
        axis.set(xlabel="context length (tokens)", ylabel="time (s)", title=kind)
    figure.suptitle(source, fontsize=10)
    figure.tight_layout(rect=(0, 0, 0.88, 1), w_pad=12)
    for axis in axes[0]:
        name_lines(axis)
    figure.savefig(folder / "speed.png")


def plot_quality(results, folder):
    labels = {"language": "held-out loss (nats a token)", "recall": "questions answered right (share)"}
    for task, kinds in results.items():
        figure, ((by_step, by_time),) = new_figure(1)
        for attention, runs in kinds.items():
            for i, run in enumerate(runs):
                steps, seconds, values = np.array(run["history"]).T
                for axis, x in ((by_step, steps), (by_time, seconds)):
                    axis.plot(x, values, color=COLOURS[attention], linewidth=WIDTHS[attention],
                              label=None if i else attention)
        by_step.set(xlabel="step", ylabel=labels[task])
        by_time.set(xlabel="time of training (s)")
        if task == "language":  # untrained models are far above what matters
            top = max(run["history"][1][2] for runs in kinds.values() for run in runs)
            for axis in (by_step, by_time):
                axis.set_ylim(top=top)
        figure.suptitle(f"{task}: every line is a seed", fontsize=10)
        figure.tight_layout(rect=(0, 0, 0.88, 1), w_pad=8)
        for axis in (by_step, by_time):
            name_lines(axis)
        figure.savefig(folder / f"quality_{task}.png")


# ------------------------------------------------------------------------------------------------------------

PARTS = {  # name: (what runs, its picture, the flags of its quick version)
    "speed": (speed, plot_speed, "--context-lengths 1024 8192 --mean-lengths 600 --repeats 2 --no-compile"),
    "rope": (rope, plot_rope, "--context-lengths 128 512"),
    "quality": (quality, plot_quality, "--seeds 1 --steps 0 --short-length 128 --short-steps 200 "
                                       "--recall-length 512 --recall-steps 16"),
    "profile": (profile, None, None),
}


def make_parser():
    on_cuda = torch.cuda.is_available()
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there, too")
    pictured = argparse.ArgumentParser(add_help=False)
    pictured.add_argument("--plot", type=Path, nargs="?", const=Path("assets"), metavar="FOLDER",
                          help="write pictures there (needs matplotlib); without a FOLDER to assets")
    pictured.add_argument("--data", help=f"{SERVED}; '' is the standard library")
    stepping = argparse.ArgumentParser(add_help=False)
    stepping.add_argument("--device", default="cuda" if on_cuda else "cpu", choices=("cpu", "cuda"))
    stepping.add_argument("--no-compile", dest="compile", action="store_false",
                          help="leave the compiled training step out, which needs a C++ compiler")
    parser = argparse.ArgumentParser(
        description="Measures the paper's claims; without a subcommand a quick version of the three.")
    parser.set_defaults(json=None, plot=None)
    parts = parser.add_subparsers(dest="part")

    def part(name, text, *parents):
        sub = parts.add_parser(name, help=text, parents=[shared, *parents],
                               formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        return sub.add_argument
    add = part("speed", "time and memory", pictured, stepping)
    lengths = dict(type=int, nargs="+", help="tokens a row")
    add("--context-lengths", default=[1024, 2048, 4096, 8192, 16384], **lengths)
    add("--mean-lengths", default=[600, 30, 6000], **lengths | {"help": "tokens a document, unless --data"})
    add("--repeats", type=int, default=5, help="timed runs of each case")
    add("--dtype", default="bfloat16" if on_cuda else "float32", help="of attention alone")
    add("--model", metavar="FOLDER", help="time the training step of a Hugging Face model instead")
    add("--full-up-to", type=int, default=131072 if on_cuda else 16384, help="longest context of full")
    add("--mask-up-to", type=int, default=8192, help="longest context for the dense mask")
    add("--flex", action="store_true", help="FlexAttention, too, forward alone; on a CPU it compiles long")
    add("--no-step", dest="step", action="store_false", help="leave the training step out")
    add("--no-memory", action="store_true", help="leave peak memory out")
    add = part("rope", "precision", pictured)
    add("--context-lengths", default=[128, 256, 512, 1024, 2048], **lengths)
    add("--checkpoint", help="a checkpoint of train.py, instead of random q and k")
    add("--model", metavar="FOLDER", help="a Hugging Face causal language model with RoPE, the whole of it")
    add = part("quality", "what each kind learns", pictured)
    add("--seeds", type=int, default=3, help="runs of each kind")
    add("--steps", type=int, default=500, help="of language modelling; 0 leaves it out")
    add("--context-length", type=int, default=2048, help="tokens a row of language modelling")
    add("--short-length", type=int, default=256, help="tokens of the documents that recall is learned on")
    add("--short-steps", type=int, default=300, help="of that")
    add("--recall-length", type=int, default=2048, help="tokens a row when each kind continues")
    add("--recall-steps", type=int, default=40, help="of that; 0 leaves the recall task out")
    add("--facts", type=int, default=1, help="facts a recall document; 1 is the passkey task")
    add = part("profile", "where a training step's time goes", stepping)
    add("--context-lengths", default=[1024, 8192], **lengths)
    add("--repeats", type=int, default=3, help="profiled steps")
    return parser


def main(argv=None):
    parser = make_parser()
    args = parser.parse_args(argv)
    print(f"PyTorch {torch.__version__}, {torch.get_num_threads()} threads"
          + (f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""))
    results = {}
    try:
        for name, (run, plot, quick) in PARTS.items():
            if args.part == name or args.part is None and quick:
                results[name] = run(args if args.part else parser.parse_args([name, *quick.split()]))
                if args.plot:
                    args.plot.mkdir(exist_ok=True)
                    plot(results[name], args.plot)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    if args.json:
        args.json.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
