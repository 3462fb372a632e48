"""Trains anchor_gpt on packed documents and shows what it learned.

    python train.py                                  # no argument needed; a CPU is enough
    python train.py --attention full --out out-full  # another attention kind
    python train.py --resume                         # go on after Ctrl-C, kill -9 or a power cut, exactly
    python train.py --resume --prompt "import os"    # only load the checkpoint and continue a text
    torchrun --standalone --nproc_per_node=2 train.py    # one process a GPU, or on a CPU for trying it

Notable: a batch of the data is a pure function of (documents, seed, number) and nothing in the model is
random, so weights, optimizer state and step number are all there is to resume from: on a CPU the resumed run
is bit-identical.
"""
import argparse
import hashlib
import itertools
import json
import math
import os
import re
import signal
import sys
import time
import timeit
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from anchor_gpt import ATTENTIONS, GPT, GPTConfig
from data import (BOS, EOS, NO_TARGET, VOCAB_SIZE, PackedRows, decode, encode, load_documents,
                  split_documents, visible_share)

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

# What a run is made of, and its checkpoint remembers. flag: (default on a CPU, on CUDA, help)
SETTINGS = {
    "attention": ("anchor", "anchor", f"attention kind: {', '.join(ATTENTIONS)}"),
    "attend": ("document", "document", "compute attention by document (fast) or by mask (the definition)"),
    "data": ("", "", "a folder, or a file: text, .jsonl, .ndjson, .json, each also as .gz; "
                     "empty: the Python standard library's source"),
    "val_fraction": (0.05, 0.05, "share of the documents held out for validation"),
    "context_length": (1024, 8192, "tokens a row, the anchor included"),
    "batch_size": (2, 2, "rows a micro-batch"),
    "grad_accumulation": (1, 4, "micro-batches a step, shared out among the processes of torchrun"),
    "checkpoint_activations": (False, False,
                               "compute activations anew in the backward: less memory, more time"),
    "compile": (False, False, "fuse what PyTorch leaves in pieces (RMSNorm above all on a CPU): faster, "
                              "after a compilation of some seconds to a minute; results differ by rounding, "
                              "so only runs compiled alike resume bit for bit"),
    "steps": (1000, 2000, "optimizer steps; the learning rate's cosine ends at the last, so --resume with "
                          "more makes it jump"),
    "learning_rate": (1e-3, 6e-4, "peak learning rate of AdamW: linear warm-up, cosine decay to a tenth"),
    "warmup_steps": (50, 100, "steps of linear warm-up"),
    "weight_decay": (0.1, 0.1, "weight decay of the matrices"),
    "grad_clip": (1.0, 1.0, "largest norm of the gradient"),
    "n_layer": (4, 12, "blocks"),
    "n_head": (4, 12, "query heads"),
    "n_kv_head": (4, 4, "key/value heads; divides the query heads"),
    "n_embd": (256, 768, "width of the residual stream"),
    "n_hidden": (688, 2048, "width of the SwiGLU"),
    "dtype": (None, "bfloat16", "autocast to bfloat16, or plain float32"),  # None: measured, by faster_dtype
    "seed": (0, 0, "seed of the weights, the order of the documents and the sampled text"),
    "eval_interval": (200, 250, "steps from one evaluation and checkpoint to the next"),
    "eval_rows": (64, 32, "held-out rows of an evaluation, the same ones every time"),
}
# What --resume may change: data may move, but its content is compared; a step may be cut or computed
# otherwise, but has the same rows.
MAY_CHANGE = ("data", "steps", "eval_interval", "batch_size", "grad_accumulation", "checkpoint_activations",
              "compile")
READ_INTERVAL = 10  # steps from one reading of loss and norm to the next: each makes the host wait for a GPU


def make_parser():
    parser = argparse.ArgumentParser(usage="python train.py [flags]", description="Trains AnchorAttention.")
    for name, (on_cpu, on_cuda, text) in SETTINGS.items():
        small = "the faster of the two on this CPU" if on_cpu is None else repr(on_cpu)
        default = small if on_cpu == on_cuda else f"{small}, {on_cuda!r} on CUDA"
        kind = type(on_cuda)
        how = {"type": kind, "metavar": kind.__name__.upper()}
        if kind is bool:
            how = {"action": argparse.BooleanOptionalAction}
        parser.add_argument(flag(name), help=f"{text} (default: {default})", **how)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu",
                        help="cpu, cuda, mps or xpu, or one of several, as in cuda:1; mps and xpu have the "
                             "defaults of a CPU, in float32 (default here: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("out"),
                        help="folder of the run (default: %(default)s)")
    parser.add_argument("--resume", action="store_true",
                        help="go on from the checkpoint in --out, if there is one")
    parser.add_argument("--prompt", help="text for the model to continue at the end; with --resume: do only "
                                         "that (default: the beginning of a held-out document)")
    return parser


def flag(name):
    return "--" + name.replace("_", "-")


def default_settings(device_type):
    """Every setting's default on a device type, "cpu", "cuda", "mps" or "xpu" -> {name: value}."""
    column = 1 if device_type == "cuda" else 0
    settings = {name: default[column] for name, default in SETTINGS.items()}
    if settings["dtype"] is None:
        settings["dtype"] = faster_dtype() if device_type == "cpu" else "float32"
    return settings


def faster_dtype():
    """"bfloat16" where this CPU multiplies matrices in it no slower than in float32, else "float32".

    Measured, for no capability flag tells it all: bfloat16 is 5 times as fast as float32 on one processor and
    500 times as slow on another (where these few products take 0.2 s).
    """
    def seconds(dtype):
        x = torch.ones(192, 192, dtype=dtype)
        x @ x  # the first product prepares the kernel
        return min(timeit.repeat(lambda: x @ x, number=1, repeat=3))
    return "bfloat16" if seconds(torch.bfloat16) <= seconds(torch.float32) else "float32"


def rows_per_step(settings):
    return settings["batch_size"] * settings["grad_accumulation"]


def model_config(settings):
    """Settings -> the GPTConfig of their model: its fields decide which of them are the model's."""
    sizes = {field.name: settings[field.name] for field in fields(GPTConfig) if field.name in settings}
    return GPTConfig(**sizes | {"vocab_size": VOCAB_SIZE})


# ------------------------------------------------------------------------------------------------------------
# The run's folder: no checkpoint is ever overwritten before its successor is complete


@contextmanager
def alone_in(folder):
    """Keeps a second run out of the folder until this one ends, however it ends."""
    if fcntl is None:
        print(f"this system has no file locks: see to it that no second run writes to {folder}")
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit(f"another run is writing to {folder}: wait for its end, or name another --out")
    try:
        yield
    finally:
        os.close(handle)


def write_whole(path, write):
    """Has write(file) write beside the old file, then renames over it: a whole one is there at any time."""
    beside = path.with_suffix(".new")
    try:
        with open(beside, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError:  # half a file on a full disk is in the way of everything
        beside.unlink(missing_ok=True)
        raise


def load_checkpoint(path):
    """-> {"model", "optimizer", "step", "settings", "corpus"}; reads tensors and plain values, runs no code.
    ValueError: a file that is no complete checkpoint of train.py."""
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        if set(checkpoint) != {"model", "optimizer", "step", "settings", "corpus"}:
            raise KeyError(f"it holds {sorted(checkpoint)}")
        return checkpoint
    except Exception as error:  # a damaged file can make torch.load raise almost anything
        raise ValueError(f"{path} is not a complete checkpoint of train.py ({error!r:.80}): put a good "
                         "one in its place, or train anew without --resume") from None


def restore(model, optimizer, checkpoint):
    try:
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the checkpoint's weights are not those of its settings ({error!r:.200}): put a "
                         "good one in its place, or train anew without --resume") from None


def set_aside(path):
    """Renames a file of an earlier run to the first free name like checkpoint-1.pt."""
    if path.exists():
        names = (path.with_stem(f"{path.stem}-{n}") for n in itertools.count(1))
        aside = next(name for name in names if not name.exists())
        path.rename(aside)
        print(f"kept the earlier {path} as {aside}")


def keep_metrics(path, step):
    """Drops the lines after a step, and a line cut short by a kill: a resumed run writes them again."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    kept = [line for line in lines if line.endswith(b"}\n") and json.loads(line)["step"] <= step]
    write_whole(path, lambda file: file.writelines(kept))


# ------------------------------------------------------------------------------------------------------------
# Learning and looking at what was learned


def learning_rate_at(step, settings):
    """The learning rate of step 0, 1, 2, ...: linear warm-up, then a cosine down to a tenth of the peak."""
    peak, warmup = settings["learning_rate"], settings["warmup_steps"]
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, settings["steps"] - warmup)
    return peak * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress)))


def make_optimizer(model, weight_decay):
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    gains = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": gains, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), fused=True)


def autocast(model, dtype):
    device = next(model.parameters()).device
    return torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bfloat16")


def sum_over_processes(number):
    """The sum of a number that each process of torchrun has; alone, the number itself."""
    if not dist.is_initialized():
        return number
    total = torch.tensor(number, dtype=torch.float64)  # on the CPU: nobody waits for a GPU
    dist.all_reduce(total)
    return total.item()


def leave_together():
    """Every process waits for the last: one that leaves early makes torchrun end the others, and one that
    leaves while a gradient or a sum is on its way may wait for itself (gloo's thread for Python's lock, and
    Python for the thread)."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def to_device(x, device):
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def train_step(model, optimizer, batches, learning_rate, grad_clip, dtype):
    """One optimizer step over micro-batches [(tokens, doc_ids, targets), ...] -> loss, gradient norm.

    The gradient is that of the mean over the targets of all micro-batches of all processes together: each
    counts by its number of targets, so k batches of n rows, on one process or on k, give the gradient of one
    batch of k n rows. It is summed in float32, the dtype of the weights, whatever autocast computes in. The
    loss is this process's part of that mean. Both are tensors (), not read here: a GPU computes while the
    next step is prepared.
    """
    device = next(model.parameters()).device
    counts = [int((targets != NO_TARGET).sum()) for _, _, targets in batches]
    n_targets = sum_over_processes(sum(counts))
    n_processes = dist.get_world_size() if dist.is_initialized() else 1
    total = 0.0
    for i, ((tokens, doc_ids, targets), count) in enumerate(zip(batches, counts)):
        # DistributedDataParallel is to send gradients once; on a GPT alone this says nothing.
        model.require_backward_grad_sync = i == len(batches) - 1
        with autocast(model, dtype):
            mean = model(to_device(tokens, device), doc_ids, to_device(targets, device))[1]
        loss = mean * (count / n_targets)
        (loss * n_processes).backward()  # DistributedDataParallel divides the sum over the processes by these
        total = total + loss.detach()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.step()
    optimizer.zero_grad()
    return total, norm


@torch.no_grad()
def token_losses(model, tokens, doc_ids, targets, dtype):
    """The cross-entropy in nats of every token, float32 (B, T); 0 where there is no target."""
    device = next(model.parameters()).device
    with autocast(model, dtype):
        logits = model(tokens.to(device), doc_ids)[0]
    return F.cross_entropy(logits.float().transpose(1, 2), targets.to(device), ignore_index=NO_TARGET,
                           reduction="none").cpu()


def evaluate(model, batch, batch_size, dtype):
    """-> (nats a token, bits a byte) over a batch of held-out rows, summed in float64. The processes of
    torchrun share the rows out, and each gets the result. An EOS costs nats, too, but is no byte."""
    rank, n_processes = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    mine = [x[rank::n_processes] for x in batch]  # of few rows, some processes may have none
    losses = torch.zeros(mine[0].shape)
    for i in range(0, len(losses), batch_size):
        losses[i:i + batch_size] = token_losses(model, *(x[i:i + batch_size] for x in mine), dtype)
    nats = sum_over_processes(losses.double().sum().item())
    targets = batch[2]
    n_targets, n_bytes = (targets != NO_TARGET).sum().item(), ((targets >= 0) & (targets < BOS)).sum().item()
    return nats / n_targets, nats / math.log(2) / n_bytes


def loss_by_position(model, documents, context_length, dtype, max_documents=64):
    """-> [(first, last, nats a token), ...] for ranges of positions that double, over documents that fill the
    context."""
    long = [d for d in documents if len(d) >= context_length - 1][:max_documents]
    if not long:
        return []
    losses = []
    for document in long:
        tokens = torch.tensor([[BOS] + encode(document[:context_length - 1])])
        targets = F.pad(tokens[:, 1:], (0, 1), value=NO_TARGET)
        losses.append(token_losses(model, tokens, None, targets, dtype))
    mean = torch.cat(losses).double().mean(dim=0)[:-1]  # (T - 1,): the row's last token has no target
    edges = [0] + [2**i for i in range(4, 64) if 2**i < context_length - 1] + [context_length - 1]
    return [(a, b - 1, mean[a:b].mean().item()) for a, b in zip(edges, edges[1:])]


def sample(model, prompt, settings, max_new_tokens=500):
    """A text that continues the prompt, str or bytes, up to its EOS."""
    torch.manual_seed(settings["seed"])
    tokens = torch.tensor([[BOS] + encode(prompt)], device=next(model.parameters()).device)
    with autocast(model, settings["dtype"]):
        ids = model.generate(tokens, max_new_tokens, temperature=0.8, top_k=50)[0].tolist()
    return decode(ids[:ids.index(EOS)] if EOS in ids else ids)


# ------------------------------------------------------------------------------------------------------------
# From flags to a run: everything that bad input can break, before the first step


@dataclass
class Run:
    settings: dict
    model: GPT
    optimizer: torch.optim.Optimizer
    device: str
    corpus: dict  # what the checkpoint remembers of the documents
    rows: PackedRows
    held_out: list  # of documents
    val_rows: PackedRows
    val_batch: tuple  # tokens, doc_ids, targets of the rows that are evaluated
    out: Path
    prompt: str | None
    rank: int  # of this process of torchrun
    n_processes: int
    resumed: bool
    start: int  # the step it goes on from


def check_device(name, n_processes):
    if not re.fullmatch(r"cpu|(cuda|mps|xpu)(:\d+)?", name):
        raise ValueError(f"--device {name}: expected cpu, cuda, mps or xpu, or one of several, as in cuda:1")
    if n_processes > 1 and name not in ("cpu", "cuda"):
        raise ValueError(f"--device {name}: under torchrun expected cpu, or cuda, where each process takes "
                         "a GPU of its own")
    device = torch.device(name)
    n_devices = torch.get_device_module(device).device_count()
    if (device.index or 0) >= n_devices:
        raise ValueError(f"--device {name}: this PyTorch sees {n_devices} {device.type.upper()} devices: use "
                         "one of them, counted from 0, or --device cpu")


def check_compiler(device):
    """ValueError where torch.compile does not work, as without a C++ compiler."""
    try:
        torch.compile(torch.neg)(torch.ones(1, device=device))
    except Exception as error:  # of a private class
        raise ValueError(f"--compile: torch.compile does not work here ({error!r:.200}): install a C++ "
                         "compiler, or use --no-compile") from None


def check_settings(settings, n_processes):
    if settings["dtype"] not in ("float32", "bfloat16"):
        raise ValueError(f"--dtype {settings['dtype']}: expected float32 or bfloat16")
    for name in ("batch_size", "grad_accumulation", "steps", "eval_interval", "eval_rows", "learning_rate",
                 "grad_clip"):
        if not settings[name] > 0:
            raise ValueError(f"{flag(name)} {settings[name]}: expected more than 0")
    for name in ("seed", "warmup_steps", "weight_decay"):
        if not 0 <= settings[name] < 2**63:
            raise ValueError(f"{flag(name)} {settings[name]}: expected 0 or more")
    if settings["compile"] and settings["checkpoint_activations"]:
        raise ValueError("--compile --checkpoint-activations: PyTorch compiles no block that it checkpoints, "
                         "so choose one of the two")
    if settings["grad_accumulation"] % n_processes:
        raise ValueError(f"--grad-accumulation {settings['grad_accumulation']}: expected a multiple of the "
                         f"{n_processes} processes")


def resumed_settings(given, defaults, checkpoint, out):
    """The settings of a checkpoint and of the flags beside --resume. ValueError: flags that contradict it."""
    unknown = set(checkpoint["settings"]) - set(SETTINGS)
    if unknown:
        raise ValueError(f"the checkpoint in {out} was made with settings that this train.py does not know: "
                         f"{', '.join(sorted(unknown))}. Resume it with the version that made it")
    saved = defaults | checkpoint["settings"]  # an older version's checkpoint may lack some
    for name, value in given.items():
        if value != saved[name] and name not in MAY_CHANGE:
            raise ValueError(f"{flag(name)} {value}, but the run in {out} was made with {saved[name]}: "
                             "--resume continues that run, so leave the flag out, or name another --out")
    settings = saved | given
    rows, saved_rows = rows_per_step(settings), rows_per_step(saved)
    if rows != saved_rows:
        flags = " ".join(f"{flag(name)} {settings[name]}" for name in ("batch_size", "grad_accumulation"))
        raise ValueError(f"{flags}: {rows} rows a step, but the run in {out} has {saved_rows}: choose two "
                         "whose product is that")
    step = checkpoint["step"]
    if settings["steps"] < step:
        raise ValueError(f"--steps {settings['steps']}: the checkpoint in {out} is at step {step} already")
    return settings


def settle(args, n_processes):
    """Flags and checkpoint -> (settings, checkpoint or None). ValueError: flags that contradict them."""
    check_device(args.device, n_processes)
    given = {name: getattr(args, name) for name in SETTINGS if getattr(args, name) is not None}
    defaults = default_settings(torch.device(args.device).type)
    defaults["grad_accumulation"] = n_processes * math.ceil(defaults["grad_accumulation"] / n_processes)
    settings, checkpoint, path = defaults | given, None, args.out / "checkpoint.pt"
    if args.resume and path.exists():
        checkpoint = load_checkpoint(path)
        settings = resumed_settings(given, defaults, checkpoint, args.out)
    elif args.resume and args.prompt is not None:
        raise ValueError(f"--resume --prompt: there is no {path} to load; train first, or name its folder "
                         "with --out")
    check_settings(settings, n_processes)
    return settings, checkpoint


def make_model(settings, checkpoint, device):
    """-> the model and its optimizer, new or those of the checkpoint."""
    torch.manual_seed(settings["seed"])
    model = GPT(model_config(settings)).to(device)
    optimizer = make_optimizer(model, settings["weight_decay"])
    if checkpoint:
        restore(model, optimizer, checkpoint)
    return model, optimizer


def prepare(args, settings, checkpoint, model, optimizer, device, rank, n_processes):
    documents = load_documents(settings["data"] or None)
    digest = hashlib.sha256(b"".join(hashlib.sha256(d).digest() for d in documents)).hexdigest()
    corpus = {"documents": len(documents), "bytes": sum(map(len, documents)), "sha256": digest}
    if checkpoint and corpus != checkpoint["corpus"]:
        raise ValueError(f"the corpus is {corpus}, but the run in {args.out} was made with "
                         f"{checkpoint['corpus']}: resuming needs the same documents, name them with --data")
    # Held out is the same for every --seed.
    for_training, held_out = split_documents(documents, settings["val_fraction"], seed=0)
    rows = PackedRows(for_training, settings["context_length"], settings["seed"])
    val_rows = PackedRows(held_out, settings["context_length"], seed=0)
    val_batch = val_rows.shuffled_batch(0, min(settings["eval_rows"], val_rows.rows_per_epoch))
    if settings["compile"]:
        check_compiler(device)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.resume and not checkpoint:
        print(f"nothing to resume in {args.out} yet, so this starts at step 0")
    return Run(settings, model, optimizer, device, corpus, rows, held_out, val_rows, val_batch, args.out,
               args.prompt, rank, n_processes, bool(checkpoint), checkpoint["step"] if checkpoint else 0)


# ------------------------------------------------------------------------------------------------------------
# A run, from its first step to what it learned


def introduce(run):
    """Prints what is going to be trained on what."""
    S, rows, n_rows = run.settings, run.rows, rows_per_step(run.settings)
    share = visible_share(rows.shuffled_batch(0, min(100, rows.rows_per_epoch))[1], S["attention"])
    processes = f"{run.n_processes} x " if run.n_processes > 1 else ""
    compiled = ", compiled" if S["compile"] else ""
    saved = f", {1 - share:.1%} are not computed" if S["attend"] == "document" else ""
    print(f"device         {processes}{run.device}, {S['dtype']}{compiled}, "
          f"{torch.get_num_threads()} threads, PyTorch {torch.__version__}")
    print(f"model          {sum(p.numel() for p in run.model.parameters()):,} parameters, "
          f"context length {S['context_length']:,}")
    print(f"attention      {S['attention']}, by {S['attend']}: "
          f"{share:.1%} of the causal pairs are visible{saved}")
    print(f"corpus         {S['data'] or 'the Python standard library'}: "
          f"{len(rows.documents):,} documents to train on ({rows.n_tokens:,} tokens), "
          f"{len(run.held_out):,} held out ({run.val_rows.n_tokens:,} tokens)")
    print(f"step           {n_rows} rows, {n_rows * S['context_length']:,} tokens; "
          f"{S['steps']} steps are {S['steps'] * n_rows / rows.rows_per_epoch:.2f} epochs")


class Diverged(Exception):
    """Loss, gradient or weights are no longer finite: nothing of it is to be saved."""


def save(run, step):
    """Writes the checkpoint after a step. Diverged: weights that are not finite."""
    if not all(p.isfinite().all() for p in run.model.parameters()):
        raise Diverged(f"step {step}: the weights are not finite")
    if run.rank == 0:
        state = {"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict(), "step": step,
                 "settings": run.settings, "corpus": run.corpus}
        write_whole(run.out / "checkpoint.pt", lambda file: torch.save(state, file))


def open_folder(run):
    """Makes the run's files begin where the run begins."""
    checkpoint, metrics = run.out / "checkpoint.pt", run.out / "metrics.jsonl"
    if run.resumed:
        print(f"resuming       at step {run.start} of {run.settings['steps']} from {checkpoint}")
        keep_metrics(metrics, run.start)
    else:
        set_aside(checkpoint)
        set_aside(metrics)
        save(run, 0)  # from here on --resume has something to go on from


def make_replica(run):
    """What the steps train: the model, compiled if asked for; under torchrun kept equal to the others'."""
    replica = torch.compile(run.model) if run.settings["compile"] else run.model
    if run.n_processes > 1:
        if run.device != "cpu":
            torch.cuda.set_device(run.device)
        # None: NCCL between GPUs, gloo for what is on the CPU. Windows has no NCCL.
        dist.init_process_group(None if run.device != "cpu" and dist.is_nccl_available() else "gloo")
        replica = DistributedDataParallel(replica)  # around what is compiled, as PyTorch advises
    return replica


@contextmanager
def stop_requests():
    """-> a list that gathers the signals (Ctrl-C, SIGTERM) from here on. A signal only asks to stop: between
    two steps weights and optimizer agree, within one they may not. On every way out the old ones are back."""
    signals = []

    def ask(signum, frame):
        signals.append(signum)
    handlers = {s: signal.signal(s, ask) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield signals
    finally:
        for s, handler in handlers.items():
            signal.signal(s, handler)


class Journal:
    """A run's metrics file and progress bar; loss and norm of a step stay on the device until read()."""

    def __init__(self, run):
        self.tokens_per_step = rows_per_step(run.settings) * run.settings["context_length"]
        path = run.out / "metrics.jsonl" if run.rank == 0 else os.devnull
        self.file = open(path, "a", buffering=1, newline="\n")  # on Windows, too: keep_metrics looks for it
        self.bar = tqdm(total=run.settings["steps"], initial=run.start, unit="step", dynamic_ncols=True,
                        disable=None if run.rank == 0 else True)
        self.unread, self.losses = [], []  # steps on the device; losses since the last evaluation
        self.restart_clock()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.bar.close()
        self.file.close()

    def restart_clock(self):
        self.began = time.perf_counter()

    def write(self, **line):
        self.file.write(json.dumps(line) + "\n")

    def read(self):
        """Reads and writes the unread steps; only here the device is waited for. Diverged: not finite."""
        read = [(step, lr, sum_over_processes(loss.item()), norm.item())
                for step, lr, loss, norm in self.unread]
        speed = self.tokens_per_step * len(read) / (time.perf_counter() - self.began)
        for step, lr, loss, norm in read:
            if not (math.isfinite(loss) and math.isfinite(norm)):
                raise Diverged(f"step {step}: the loss is {loss} and the norm of its gradient {norm}")
            self.write(step=step, loss=loss, lr=lr, grad_norm=norm, tokens_per_second=speed)
            self.losses.append(loss)
        self.bar.set_postfix_str(f"loss {loss:.3f}, lr {lr:.1e}, {speed:,.0f} tokens/s", refresh=False)
        self.bar.update(len(read))
        self.unread.clear()
        self.restart_clock()

    def evaluated(self, step, nats, bits):
        self.write(step=step, val_loss=nats, bits_per_byte=bits)
        self.bar.write(f"step {step:>5}    train {sum(self.losses) / len(self.losses):.3f}    "
                       f"validation {nats:.3f} nats a token, {bits:.3f} bits a byte")
        self.losses.clear()


def micro_batches(run, step):
    """This process's micro-batches of a step: every row of the step belongs to one process."""
    size, rows = run.settings["batch_size"], rows_per_step(run.settings)
    first = step * rows + run.rank * rows // run.n_processes
    return [run.rows.shuffled_batch(first + i, size) for i in range(0, rows // run.n_processes, size)]


def train(run):
    """Steps until the last, then shows what was learned; or until a signal, then exits with 128 + signal."""
    S, replica, evaluation, stop = run.settings, make_replica(run), None, False
    with stop_requests() as signals, Journal(run) as journal:
        for step in range(run.start, S["steps"]):
            lr = learning_rate_at(step, S)
            batches = micro_batches(run, step)
            loss, norm = train_step(replica, run.optimizer, batches, lr, S["grad_clip"], S["dtype"])
            journal.unread.append((step + 1, lr, loss, norm))
            stop = sum_over_processes(len(signals)) > 0  # all processes stop after the same step
            evaluating = (step + 1) % S["eval_interval"] == 0 or step + 1 == S["steps"]
            if stop or evaluating or len(journal.unread) == READ_INTERVAL:
                journal.read()
            if evaluating:
                evaluation = evaluate(run.model, run.val_batch, S["batch_size"], S["dtype"])
                journal.evaluated(step + 1, *evaluation)
            if stop or evaluating:
                save(run, step + 1)
                journal.restart_clock()
            if stop:
                break
        leave_together()  # with signals still caught, for torchrun hands them on a second time
        if stop:
            journal.bar.write(f"stopped after step {step + 1} of {S['steps']} and saved "
                              f"{run.out / 'checkpoint.pt'}; to go on: "
                              f"python train.py --resume --out {run.out}")
            sys.exit(128 + (signals or [signal.SIGTERM])[0])
    if run.rank == 0:
        show(run, evaluation or evaluate(run.model, run.val_batch, S["batch_size"], S["dtype"]))


def show(run, evaluation):
    """Prints what the trained model knows, and how it continues a text."""
    S, model = run.settings, run.model
    print("\nvalidation loss {:.3f} nats a token, {:.3f} bits a byte".format(*evaluation))
    by_position = loss_by_position(model, run.held_out, S["context_length"], S["dtype"])
    if by_position:
        print("\nloss by position in long held-out documents (falling: the model uses its context)")
    for first, last, nats in by_position:
        print(f"{first:>7,} - {last:<7,} {nats:.3f} " + "█" * round(15 * nats))
    prompt = run.held_out[0][:32] if run.prompt is None else run.prompt
    print(f"\nsample, continuing {decode(encode(prompt))!r}\n\n{sample(model, prompt, S)}\n\n"
          f"checkpoint: {run.out / 'checkpoint.pt'}")


def main(argv=None):
    parser = make_parser()
    args = parser.parse_args(argv)
    rank = int(os.environ.get("RANK", 0))  # torchrun sets both
    n_processes = int(os.environ.get("WORLD_SIZE", 1))
    if rank > 0:
        sys.stdout = open(os.devnull, "w")  # one process speaks and saves, for all of them
    checkpoint_path = args.out / "checkpoint.pt"
    try:
        settings, checkpoint = settle(args, n_processes)
        device = args.device
        if n_processes > 1 and device == "cuda":
            device = f"cuda:{os.environ['LOCAL_RANK']}"
        model, optimizer = make_model(settings, checkpoint, device)
        if checkpoint and args.prompt is not None:
            print(sample(model, args.prompt, settings))
            return
        run = prepare(args, settings, checkpoint, model, optimizer, device, rank, n_processes)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    try:
        with alone_in(args.out) if rank == 0 else nullcontext():
            introduce(run)
            if rank == 0:
                open_folder(run)
            train(run)
    except Diverged as error:
        sys.exit(f"{error}, expected finite numbers; {checkpoint_path} is what was saved before that. Train "
                 "anew with a lower --learning-rate or a longer --warmup-steps")
    except OSError as error:
        sys.exit(f"could not write: {error}; {checkpoint_path} is as it was saved before, if it was. Make "
                 "room, then go on with --resume")
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
            raise
        sys.exit(f"out of memory: {str(error).splitlines()[0]}\nadd --checkpoint-activations, halve "
                 "--batch-size and double --grad-accumulation (both with --resume, from "
                 f"{checkpoint_path}), or train anew with a lower --context-length")


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # a terminal without block characters shows question marks
    main()
