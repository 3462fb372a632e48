"""Trains anchor_gpt on packed documents and shows what it learned.

    python train.py                                  # no argument needed; a CPU is enough
    python train.py --attention full --out out-full  # another attention kind
    python train.py --resume                         # go on after Ctrl-C, kill -9 or a power cut, exactly
    python train.py --resume --prompt "import os"    # only load the checkpoint and continue a text
    torchrun --standalone --nproc_per_node=2 train.py    # one process a GPU, or on a CPU for trying it

Notable: a batch of the data is a pure function of (documents, seed, number) and nothing in the model is random, so weights,
optimizer state and step number are all there is to resume from: on a CPU the resumed run is bit-identical.
"""
import argparse
import dataclasses
import fcntl
import hashlib
import json
import math
import os
import re
import signal
import sys
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from anchor_gpt import ATTENTIONS, GPT, GPTConfig
from data import (BOS, EOS, NO_TARGET, VOCAB_SIZE, PackedRows, decode, encode, load_documents, split_documents,
                  visible_share)

NATIVE_BFLOAT16 = torch.cpu._is_avx512_bf16_supported()  # without these instructions a CPU stays in float32

SETTINGS = {  # what a run is made of, and its checkpoint remembers. flag: (default on a CPU, on CUDA, help)
    "attention": ("anchor", "anchor", f"attention kind: {', '.join(ATTENTIONS)}"),
    "attend": ("document", "document", "compute attention by document (fast) or by mask (the definition)"),
    "data": ("", "", "a folder of text files, a .txt or a .jsonl; empty: the Python standard library's source"),
    "val_fraction": (0.05, 0.05, "share of the documents held out for validation"),
    "context_length": (1024, 8192, "tokens a row, the anchor included"),
    "batch_size": (2, 2, "rows a micro-batch"),
    "grad_accumulation": (1, 4, "micro-batches an optimizer step, shared out among the processes of torchrun"),
    "checkpoint_activations": (False, False, "keep less for the backward, compute it again: less memory, more time"),
    "steps": (1000, 2000, "optimizer steps; the cosine ends at the last, so --resume with more makes the rate jump"),
    "learning_rate": (1e-3, 6e-4, "peak learning rate of AdamW: linear warm-up, cosine decay to a tenth"),
    "warmup_steps": (50, 100, "steps of linear warm-up"),
    "weight_decay": (0.1, 0.1, "weight decay of the matrices"),
    "grad_clip": (1.0, 1.0, "largest norm of the gradient"),
    "n_layer": (4, 12, "blocks"),
    "n_head": (4, 12, "query heads"),
    "n_kv_head": (4, 4, "key/value heads; divides the query heads"),
    "n_embd": (256, 768, "width of the residual stream"),
    "n_hidden": (688, 2048, "width of the SwiGLU"),
    "dtype": ("bfloat16" if NATIVE_BFLOAT16 else "float32", "bfloat16", "autocast to bfloat16, or plain float32"),
    "seed": (0, 0, "seed of the weights, the order of the documents and the sampled text"),
    "eval_interval": (200, 250, "steps from one evaluation and checkpoint to the next"),
    "eval_rows": (64, 32, "held-out rows of an evaluation, the same ones every time"),
}
# What --resume may change: data may move, but its content is compared; a step may be cut otherwise, but has the same rows.
MAY_CHANGE = ("data", "steps", "eval_interval", "batch_size", "grad_accumulation", "checkpoint_activations")


def default_settings(device_type):
    return {name: default[device_type == "cuda"] for name, default in SETTINGS.items()}


def model_config(settings):
    names = {f.name for f in dataclasses.fields(GPTConfig)}
    return GPTConfig(vocab_size=VOCAB_SIZE, **{n: v for n, v in settings.items() if n in names})


READ_INTERVAL = 10  # steps from one reading of loss and norm to the next: each makes the host wait for a GPU


def make_parser():
    parser = argparse.ArgumentParser(usage="python train.py [flags]", description="Trains AnchorAttention.")
    for name, (cpu, cuda, text) in SETTINGS.items():
        default = f"{cpu!r}" if cpu == cuda else f"{cpu!r} on a CPU, {cuda!r} on CUDA"
        kind = {"action": argparse.BooleanOptionalAction} if cpu is False else \
            {"type": type(cpu), "metavar": type(cpu).__name__.upper()}
        parser.add_argument("--" + name.replace("_", "-"), help=f"{text} (default: {default})", **kind)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu",
                        help="cpu, cuda or cuda:N (default here: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the run (default: %(default)s)")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out, if there is one")
    parser.add_argument("--prompt", help="text for the model to continue at the end; with --resume: do only that "
                                         "(default: the beginning of a held-out document)")
    return parser


# ----------------------------------------------------------------------------------------------------------------
# The run's folder: no checkpoint is ever overwritten before its successor is complete


def write_whole(path, write):
    """Has write(file) write beside the old file, then renames over it: whenever the program dies, a whole one is there."""
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
        raise ValueError(f"{path} is not a complete checkpoint of train.py ({error!r:.80}): put a good one in its place, "
                         "or train anew without --resume") from None


def restore(model, optimizer, checkpoint):
    try:
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the checkpoint's weights are not those of its settings ({error!r:.200}): put a good one in its "
                         "place, or train anew without --resume") from None


def set_aside(path):
    """Renames a file of an earlier run to the first free name like checkpoint-1.pt."""
    if path.exists():
        n = next(n for n in range(1, sys.maxsize) if not path.with_stem(f"{path.stem}-{n}").exists())
        print(f"kept the earlier {path} as {path.rename(path.with_stem(f'{path.stem}-{n}'))}")


def keep_metrics(path, step):
    """Drops the lines after a step, and a line cut short by a kill: a resumed run writes them again."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    write_whole(path, lambda file: file.writelines(x for x in lines if x.endswith(b"}\n") and json.loads(x)["step"] <= step))


# ----------------------------------------------------------------------------------------------------------------
# Learning and looking at what was learned


def learning_rate_at(step, settings):
    """The learning rate of optimizer step 0, 1, 2, ...: linear warm-up, then a cosine down to a tenth of the peak."""
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
    """Every process waits for the last: one that leaves early makes torchrun end the others, and one that leaves while a
    gradient or a sum is still on its way may wait for itself (gloo's thread for Python's lock, Python for the thread)."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def to_device(x, device):
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def train_step(model, optimizer, batches, learning_rate, grad_clip, dtype):
    """One optimizer step over micro-batches [(tokens, doc_ids, targets), ...] -> loss, norm of the gradient, tensors ().

    The gradient is that of the mean over the targets of all micro-batches of all processes together: each counts by its
    number of targets, so k batches of n rows, on one process or on k, give the gradient of one batch of k n rows. The loss
    is this process's part of that mean. Neither is read here, so the next step is prepared while a GPU computes.
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
            loss = model(to_device(tokens, device), doc_ids, to_device(targets, device))[1] * (count / n_targets)
        (loss * n_processes).backward()  # DistributedDataParallel takes the mean over the processes, where this is a sum
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
    """-> (nats a token, bits a byte) over a batch of held-out rows. An EOS costs nats, too, but is no byte."""
    losses = torch.cat([token_losses(model, *micro, dtype) for micro in zip(*(x.split(batch_size) for x in batch))])
    targets, nats = batch[2], losses.double().sum().item()
    return nats / (targets != NO_TARGET).sum().item(), nats / math.log(2) / ((targets >= 0) & (targets < BOS)).sum().item()


def loss_by_position(model, documents, context_length, dtype, max_documents=64):
    """-> [(first, last, nats a token), ...] for position ranges that double, over documents that fill the context."""
    long = [d for d in documents if len(d) >= context_length - 1][:max_documents]
    if not long:
        return []
    losses = []
    for document in long:
        tokens = torch.tensor([[BOS] + encode(document[:context_length - 1])])
        targets = F.pad(tokens[:, 1:], (0, 1), value=NO_TARGET)
        losses.append(token_losses(model, tokens, None, targets, dtype))
    mean = torch.cat(losses).mean(dim=0)[:-1]  # (T - 1,): the row's last token has no target
    edges = [0] + [2**i for i in range(4, 64) if 2**i < context_length - 1] + [context_length - 1]
    return [(a, b - 1, mean[a:b].mean().item()) for a, b in zip(edges, edges[1:])]


def sample(model, prompt, settings, max_new_tokens=500):
    """A text that continues the prompt, str or bytes, up to its EOS."""
    torch.manual_seed(settings["seed"])
    tokens = torch.tensor([[BOS] + encode(prompt)], device=next(model.parameters()).device)
    with autocast(model, settings["dtype"]):
        ids = model.generate(tokens, max_new_tokens, temperature=0.8, top_k=50)[0].tolist()
    return decode(ids[:ids.index(EOS)] if EOS in ids else ids)


def show(model, val_batch, val_documents, prompt, settings):
    """Prints what a trained model knows; prompt None: it continues the beginning of a held-out document."""
    dtype = settings["dtype"]
    val_loss, bits = evaluate(model, val_batch, settings["batch_size"], dtype)
    print(f"\nvalidation loss {val_loss:.3f} nats a token, {bits:.3f} bits a byte")
    by_position = loss_by_position(model, val_documents, settings["context_length"], dtype)
    if by_position:
        print("\nloss by position in long held-out documents (falling: the model uses its context)")
    for first, last, nats in by_position:
        print(f"{first:>7,} - {last:<7,} {nats:.3f} " + "█" * round(15 * nats))
    prompt = val_documents[0][:32] if prompt is None else prompt
    print(f"\nsample, continuing {decode(encode(prompt))!r}\n\n{sample(model, prompt, settings)}\n")


# ----------------------------------------------------------------------------------------------------------------


def settle(args, n_processes):
    """Flags, checkpoint and defaults -> (settings, checkpoint or None). ValueError: flags that contradict either."""
    if not re.fullmatch(r"cpu|cuda(:\d+)?", args.device):
        raise ValueError(f"--device {args.device}: expected cpu, cuda or cuda:N")
    device = args.device.split(":")[0]
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {args.device}: this PyTorch sees no CUDA device, use --device cpu")
    if n_processes > 1 and ":" in args.device:
        raise ValueError(f"--device {args.device}: under torchrun every process takes a GPU of its own, use --device cuda")
    given = {name: getattr(args, name) for name in SETTINGS if getattr(args, name) is not None}
    settings = {name: default[device == "cuda"] for name, default in SETTINGS.items()}
    settings["grad_accumulation"] = n_processes * math.ceil(settings["grad_accumulation"] / n_processes)
    checkpoint = None
    path = args.out / "checkpoint.pt"
    if args.resume and path.exists():
        checkpoint = load_checkpoint(path)
        unknown = set(checkpoint["settings"]) - set(SETTINGS)
        if unknown:
            raise ValueError(f"{path} was made with settings that this train.py does not know: {', '.join(sorted(unknown))}. "
                             "Resume it with the version that made it")
        saved = settings | checkpoint["settings"]  # those that an older version did not have are at their defaults
        for name, value in given.items():
            if value != saved[name] and name not in MAY_CHANGE:
                raise ValueError(f"--{name.replace('_', '-')} {value}, but the run in {args.out} was made with "
                                 f"{saved[name]}: --resume continues that run, so leave the flag out, or train anew in "
                                 "another --out")
        settings = saved | given
        rows, saved_rows = (x["batch_size"] * x["grad_accumulation"] for x in (settings, saved))
        if rows != saved_rows:
            raise ValueError(f"--batch-size {settings['batch_size']} --grad-accumulation {settings['grad_accumulation']}: {rows} "
                             f"rows a step, but the run in {args.out} has {saved_rows}: choose two whose product is that")
        if settings["steps"] < checkpoint["step"]:
            raise ValueError(f"--steps {settings['steps']}: the checkpoint in {args.out} is at step {checkpoint['step']} already")
    elif args.resume and args.prompt is not None:
        raise ValueError(f"--resume --prompt: there is no {path} to load; train first, or name its folder with --out")
    else:
        settings |= given
    if settings["dtype"] not in ("float32", "bfloat16"):
        raise ValueError(f"--dtype {settings['dtype']}: expected float32 or bfloat16")
    for name in ("batch_size", "grad_accumulation", "steps", "eval_interval", "eval_rows", "learning_rate", "grad_clip"):
        if not settings[name] > 0:
            raise ValueError(f"--{name.replace('_', '-')} {settings[name]}: expected more than 0")
    for name in ("seed", "warmup_steps", "weight_decay"):
        if not 0 <= settings[name] < 2**63:
            raise ValueError(f"--{name.replace('_', '-')} {settings[name]}: expected 0 or more")
    if settings["grad_accumulation"] % n_processes:
        raise ValueError(f"--grad-accumulation {settings['grad_accumulation']}: expected a multiple of the {n_processes} processes")
    return settings, checkpoint


@contextmanager
def alone_in(folder):
    """Keeps a second run out of the folder until this one ends, however it ends."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit(f"another run is writing to {folder}: wait for its end, or name another --out")
    try:
        yield
    finally:
        os.close(handle)


def prepare(args, rank, n_processes):
    """Everything that bad input can break, before the first step -> a namespace of what training needs; None where a
    prompt was all that was asked for."""
    settings, checkpoint = settle(args, n_processes)
    torch.manual_seed(settings["seed"])
    sizes = {name: settings[name] for name in ("n_layer", "n_head", "n_kv_head", "n_embd", "n_hidden", "attention", "attend",
                                               "context_length", "checkpoint_activations")}
    device = f"cuda:{os.environ['LOCAL_RANK']}" if args.device == "cuda" and n_processes > 1 else args.device
    model = GPT(GPTConfig(vocab_size=VOCAB_SIZE, **sizes)).to(device)
    optimizer = make_optimizer(model, settings["weight_decay"])
    if checkpoint:
        restore(model, optimizer, checkpoint)
        if args.prompt is not None:
            return print(sample(model, args.prompt, settings))
    documents = load_documents(settings["data"] or None)
    digest = hashlib.sha256(b"".join(hashlib.sha256(d).digest() for d in documents)).hexdigest()
    corpus = {"documents": len(documents), "bytes": sum(map(len, documents)), "sha256": digest}
    if checkpoint and corpus != checkpoint["corpus"]:
        raise ValueError(f"the corpus is {corpus}, but the run in {args.out} was made with {checkpoint['corpus']}: "
                         "resuming needs the same documents, name them with --data")
    for_training, held_out = split_documents(documents, settings["val_fraction"], seed=0)  # for every --seed the same
    rows = PackedRows(for_training, settings["context_length"], settings["seed"])
    val_rows = PackedRows(held_out, settings["context_length"], seed=0)
    val_batch = val_rows.shuffled_batch(0, min(settings["eval_rows"], val_rows.rows_per_epoch))
    args.out.mkdir(parents=True, exist_ok=True)
    if args.resume and not checkpoint:
        print(f"nothing to resume in {args.out} yet, so this starts at step 0")
    return argparse.Namespace(settings=settings, checkpoint=checkpoint, device=device, model=model, optimizer=optimizer,
                              corpus=corpus, rows=rows, held_out=held_out, val_rows=val_rows, val_batch=val_batch,
                              out=args.out, prompt=args.prompt, rank=rank, n_processes=n_processes)


def introduce(job):
    """Prints what is going to be trained on what."""
    S, rows = argparse.Namespace(**job.settings), job.rows
    share = visible_share(rows.shuffled_batch(0, min(100, rows.rows_per_epoch))[1], S.attention)
    rows_per_step = S.batch_size * S.grad_accumulation
    print(f"device         {f'{job.n_processes} x ' if job.n_processes > 1 else ''}{job.device}, {S.dtype}, "
          f"{torch.get_num_threads()} threads, PyTorch {torch.__version__}\n"
          f"model          {sum(p.numel() for p in job.model.parameters()):,} parameters, context length {S.context_length:,}\n"
          f"attention      {S.attention}, by {S.attend}: {share:.1%} of the causal pairs are visible"
          f"{f', {1 - share:.1%} are not computed' if S.attend == 'document' else ''}\n"
          f"corpus         {S.data or 'the Python standard library'}: {len(rows.documents):,} documents to train on "
          f"({rows.n_tokens:,} tokens), {len(job.held_out):,} held out ({job.val_rows.n_tokens:,} tokens)\n"
          f"step           {rows_per_step} rows, {rows_per_step * S.context_length:,} tokens; {S.steps} steps are "
          f"{S.steps * rows_per_step / rows.rows_per_epoch:.2f} epochs")


def train(job):
    S, model, optimizer, rows = argparse.Namespace(**job.settings), job.model, job.optimizer, job.rows
    rows_per_step = S.batch_size * S.grad_accumulation
    tokens_per_step = rows_per_step * S.context_length
    checkpoint_path, metrics_path = job.out / "checkpoint.pt", job.out / "metrics.jsonl"

    def diverged(step, what):
        sys.exit(f"step {step}: {what}, expected finite numbers; {checkpoint_path} is what was saved before that. Train anew "
                 "with a lower --learning-rate or a longer --warmup-steps")

    def save(step):
        if not all(p.isfinite().all() for p in model.parameters()):
            diverged(step, "the weights are not finite")
        if job.rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "settings": job.settings,
                     "corpus": job.corpus}
            write_whole(checkpoint_path, lambda file: torch.save(state, file))

    start = 0
    if job.checkpoint:
        start = job.checkpoint["step"]
        print(f"resuming       at step {start} of {S.steps} from {checkpoint_path}")
        if job.rank == 0:
            keep_metrics(metrics_path, start)
    elif job.rank == 0:
        set_aside(checkpoint_path)
        set_aside(metrics_path)
        save(0)  # from here on --resume has something to go on from

    # No torch.compile: every packing has other lengths, so every step compiled anew, 15 to 34 s each on 2 cores.
    replica = model
    if job.n_processes > 1:
        if job.device != "cpu":
            torch.cuda.set_device(job.device)
        dist.init_process_group()  # gloo between CPUs, NCCL between GPUs
        replica = DistributedDataParallel(model)

    # A signal only asks to stop: between two steps weights and optimizer agree, within one they may not.
    signals = []
    handlers = {s: signal.signal(s, lambda signum, frame: signals.append(signum)) for s in (signal.SIGINT, signal.SIGTERM)}
    metrics = open(metrics_path if job.rank == 0 else os.devnull, "a", buffering=1)
    bar = tqdm(total=S.steps, initial=start, unit="step", disable=None if job.rank == 0 else True, dynamic_ncols=True)
    unread, losses = [], []  # steps whose loss is still on the device; losses since the last evaluation
    began = time.perf_counter()
    for step in range(start, S.steps):
        first = step * rows_per_step + job.rank * rows_per_step // job.n_processes  # every row belongs to one process
        batches = [rows.shuffled_batch(first + i, S.batch_size) for i in range(0, rows_per_step // job.n_processes, S.batch_size)]
        lr = learning_rate_at(step, job.settings)
        unread.append((step + 1, lr, *train_step(replica, optimizer, batches, lr, S.grad_clip, S.dtype)))
        stop = sum_over_processes(len(signals)) > 0  # all processes stop after the same step
        look = (step + 1) % S.eval_interval == 0 or step + 1 == S.steps
        if stop or look or len(unread) == READ_INTERVAL:
            # The one place that waits for the device.
            read = [(number, lr, sum_over_processes(loss.item()), norm.item()) for number, lr, loss, norm in unread]
            speed = tokens_per_step * len(read) / (time.perf_counter() - began)
            for number, lr, loss, norm in read:
                if not (math.isfinite(loss) and math.isfinite(norm)):
                    bar.close()
                    diverged(number, f"the loss is {loss} and the norm of its gradient {norm}")
                metrics.write(json.dumps({"step": number, "loss": loss, "lr": lr, "grad_norm": norm,
                                          "tokens_per_second": speed}) + "\n")
                losses.append(loss)
            bar.set_postfix_str(f"loss {losses[-1]:.3f}, lr {lr:.1e}, {speed:,.0f} tokens/s", refresh=False)
            bar.update(len(read))
            unread.clear()
            began = time.perf_counter()
        if look:
            if job.rank == 0:  # the others wait in their next step
                val_loss, bits = evaluate(model, job.val_batch, S.batch_size, S.dtype)
                metrics.write(json.dumps({"step": step + 1, "val_loss": val_loss, "bits_per_byte": bits}) + "\n")
                bar.write(f"step {step + 1:>5}    train {sum(losses) / len(losses):.3f}    validation {val_loss:.3f} nats "
                          f"a token, {bits:.3f} bits a byte")
            losses.clear()
        if look or stop:
            save(step + 1)
            began = time.perf_counter()
        if stop:
            leave_together()
            bar.close()
            print(f"stopped after step {step + 1} of {S.steps} and saved {checkpoint_path}; to go on: "
                  f"python train.py --resume --out {job.out}")
            sys.exit(128 + (signals or [signal.SIGTERM])[0])
    bar.close()
    metrics.close()
    for s, handler in handlers.items():
        signal.signal(s, handler)
    leave_together()
    if job.rank == 0:
        show(model, job.val_batch, job.held_out, job.prompt, job.settings)
        print(f"checkpoint: {checkpoint_path}")


def main(argv=None):
    parser = make_parser()
    args = parser.parse_args(argv)
    rank, n_processes = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # torchrun sets them
    if rank > 0:
        sys.stdout = open(os.devnull, "w")  # one process speaks and saves, for all of them
    try:
        job = prepare(args, rank, n_processes)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    if not job:
        return
    try:
        with alone_in(args.out) if rank == 0 else nullcontext():
            introduce(job)
            train(job)
    except OSError as error:
        sys.exit(f"could not write: {error}; {args.out / 'checkpoint.pt'} is as it was saved before, if it was. Make room, then go "
                 "on with --resume")
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
            raise
        sys.exit(f"out of memory: {str(error).splitlines()[0]}\nadd --checkpoint-activations, halve --batch-size and double "
                 f"--grad-accumulation (both with --resume, from {args.out / 'checkpoint.pt'}), or train anew with a lower "
                 "--context-length")


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # a terminal without block characters shows question marks
    main()
