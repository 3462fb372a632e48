"""Documents as rows of packed tokens, each row behind an anchor.

Tokens are bytes, so there is no vocabulary to train or download: ids 0 ... 255 are bytes, 256 is BOS (the
anchor), 257 is EOS (it ends each document). The default corpus is on every machine that runs this program:
the source files of the Python standard library. `python data.py [path]` describes a corpus.
"""
import argparse
import codecs
import gzip
import io
import json
import os
import sys
import sysconfig
import warnings
import zlib
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from anchor_gpt import ATTENTIONS, visible_pairs

BOS, EOS, VOCAB_SIZE = 256, 257, 258
NO_TARGET = -100  # what cross_entropy ignores


def encode(text_or_bytes):
    """str (as UTF-8) or bytes -> list of token ids, without BOS or EOS."""
    if isinstance(text_or_bytes, str):
        # surrogateescape: what Python made of bytes in the command line that are no UTF-8 becomes them again
        text_or_bytes = text_or_bytes.encode(errors="surrogateescape")
    return list(text_or_bytes)


def decode(ids):
    """Token ids -> str; BOS and EOS are left out, bytes that are not UTF-8 become U+FFFD."""
    return bytes(i for i in ids if i < BOS).decode(errors="replace")


# ------------------------------------------------------------------------------------------------------------
# From files to documents


SERVED = ('a folder, a text file (<|endoftext|> separates documents), a .jsonl or .ndjson (one {"text": ...} '
          'a line), a .json (a list of {"text": ...}), or one of these files as .gz')
CONVERT = {  # recognised but not served: what makes it something that is
    ".parquet": "pandas.read_parquet(FILE).to_json('x.jsonl', orient='records', lines=True)",
    ".arrow": "datasets.Dataset.from_file(FILE).to_json('x.jsonl')",
    ".zst": "zstd -d FILE",
    ".xz": "xz -d FILE",
    ".bz2": "bzip2 -d FILE",
}


def files_below(folder):
    """The files in a folder and below it in a fixed order, without hidden ones and installed packages."""
    packages = "site-packages", "dist-packages"
    for where, folders, names in os.walk(folder):
        folders[:] = sorted(f for f in folders if not f.startswith(".") and f not in packages)
        for file in [Path(where, name) for name in sorted(names) if not name.startswith(".")]:
            if file.is_file() or not file.exists():  # no pipes, which would wait for ever
                yield file


def ending_of(path):
    """What decides how a file is read: ".jsonl" for a.jsonl, a.JSONL and a.jsonl.gz."""
    return (path.with_suffix("") if path.suffix.lower() == ".gz" else path).suffix.lower()


def as_utf8(file):
    """A binary file -> the same behind its byte order mark, if it has one; UTF-16 with a mark as UTF-8."""
    mark = file.read(3)
    if mark.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return io.BytesIO((mark + file.read()).decode("utf-16", errors="replace").encode())
    file.seek(3 if mark == codecs.BOM_UTF8 else 0)
    return file


NO_TEXT = ValueError, KeyError, TypeError, AttributeError  # what json.loads(line)["text"].encode() raises


def read_jsonl(file, path):
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            document = json.loads(line)["text"].encode()
        except NO_TEXT:
            raise ValueError(f'{path}, line {number}: expected a JSON object with a "text" of valid Unicode, '
                             f"got {line[:60].decode(errors='replace')!r}") from None
        yield document


def read_json(file, path):
    try:
        yield from [item["text"].encode() for item in json.load(file)]
    except NO_TEXT as error:
        raise ValueError(f'{path}: expected a list of {{"text": ...}} of valid Unicode, got {error!r}; '
                         "a file with one such object a line is a .jsonl") from None


def read_text(file, path):
    parts = file.read().split(b"<|endoftext|>")
    parts[1:] = [part.lstrip() for part in parts[1:]]  # white space around a separator belongs to no document
    parts[:-1] = [part.rstrip() for part in parts[:-1]]
    yield from parts


READERS = {".jsonl": read_jsonl, ".ndjson": read_jsonl, ".json": read_json}  # any other ending: read_text


def read_by_ending(path):
    """The documents of a file, each with the number of the file's bytes that have been read so far."""
    with path.open("rb") as packed:
        file = gzip.open(packed) if path.suffix.lower() == ".gz" else packed
        try:
            for document in READERS.get(ending_of(path), read_text)(as_utf8(file), path):
                yield document, packed.tell()
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"{path}: expected a whole gzip file, got {error!r}; make it again") from None


def read_as_it_stands(path):
    document = path.read_bytes()
    yield document, len(document)


def load_documents(path=None):
    """The documents of a corpus, as a list of bytes; empty ones are left out.

    What a file is decides how it is read, alone or in a folder:
        .jsonl, .ndjson    one {"text": ...} a line
        .json              a list of {"text": ...}
        any other          text, in which <|endoftext|> separates documents; UTF-16 behind a byte order mark
                           becomes UTF-8, else bytes are taken as they are, without the mark of UTF-8
        .gz behind these   the same, unpacked
    path: a file; a folder, with all files in it and below it save hidden ones and installed packages; None:
    the source files of the Python standard library that runs this program, each one document as it stands.
    Left out with a warning: documents with a NUL byte, which are no text; in a folder also files that cannot
    be read and any .json that is something else (package.json).
    ValueError: a path that does not exist or holds no text; another file that is not what its ending says;
    .parquet and the like, alone or in a folder. OSError: a file, named as path, that cannot be read.
    """
    source = Path(path if path is not None else sysconfig.get_path("stdlib"))
    if not source.exists():
        raise ValueError(f"data path {str(source)!r} does not exist: expected {SERVED}")
    is_folder = source.is_dir()
    files = list(files_below(source)) if is_folder else [source]
    if path is None:
        files = [file for file in files if file.suffix == ".py"]
    for file in files:
        if how := CONVERT.get(ending_of(file)):
            raise ValueError(f"{file} cannot be read: expected {SERVED}; to convert it: {how}")

    documents, left_out = [], defaultdict(list)
    read = read_as_it_stands if path is None else read_by_ending
    n_bytes = sum(file.stat().st_size for file in files if file.exists())
    bar = tqdm(total=n_bytes, desc="reading", unit="B", unit_scale=True,
               delay=1, disable=None, leave=False)  # for what takes more than a second, on a terminal
    with bar:
        for file in files:
            begin, found = bar.n, []
            try:
                for document, n_read in read(file):
                    found.append(document)
                    bar.update(begin + n_read - bar.n)
            except OSError as error:
                if not is_folder:
                    raise
                left_out[f"files that cannot be read ({error.strerror})"].append(file)
                continue
            except ValueError:
                if not is_folder or file.suffix.lower() != ".json":
                    raise
                left_out['.json files that are no list of {"text": ...}'].append(file)
                continue
            for document in found:
                if b"\0" in document:
                    left_out["documents with a NUL byte, no text (UTF-16 needs its mark)"].append(file)
                elif document:
                    documents.append(document)
    for what, where in left_out.items():
        warnings.warn(f"left out: {len(where):,} {what}; the first: {where[0]}")
    if not documents:
        raise ValueError(f"data path {str(source)!r} holds no text: expected {SERVED}")
    return documents


def split_documents(documents, val_fraction, seed):
    """Holds out whole documents for validation -> (train, val), two lists; at least one document in each.

    val_fraction: the share of the documents to hold out, between 0 and 1.
    ValueError: another val_fraction, or fewer than two documents.
    """
    if not 0 < val_fraction < 1:
        raise ValueError(f"val_fraction is {val_fraction}, expected a number between 0 and 1")
    if len(documents) < 2:
        raise ValueError(f"the corpus has {len(documents)} document, too few to hold one out: "
                         "expected at least 2; in a text file separate documents by <|endoftext|>")
    order = np.random.default_rng(seed).permutation(len(documents))
    n_val = min(max(1, round(len(documents) * val_fraction)), len(documents) - 1)
    return [documents[i] for i in order[n_val:]], [documents[i] for i in order[:n_val]]


# ------------------------------------------------------------------------------------------------------------
# From documents to rows


class PackedRows:
    """Rows of context_length tokens, [anchor, document, document, ...], filled to the end, without padding.

    Every epoch shuffles the documents, puts EOS after each, and cuts the stream into rows. A document that
    does not fit goes on in the next row, behind that row's anchor. No token is lost or repeated within an
    epoch, save the tail that cannot fill a row.

    documents: each as bytes, or as a sequence of another tokenizer's ids, then with that tokenizer's bos (the
    anchor) and eos, which may be the same.
    ValueError: a context_length below 2, a negative seed, or documents that cannot fill one row.
    """

    def __init__(self, documents, context_length, seed, bos=BOS, eos=EOS):
        if seed < 0:
            raise ValueError(f"seed is {seed}, expected 0 or more")
        if context_length < 2:
            raise ValueError(f"context_length is {context_length}, expected at least 2: "
                             "the anchor and one token")
        self.documents, self.context_length, self.seed = documents, context_length, seed
        self.bos, self.eos = bos, eos
        self.lengths = np.array([len(d) + 1 for d in documents], dtype=np.int64)  # with EOS
        self.n_tokens = int(self.lengths.sum())
        self.rows_per_epoch = self.n_tokens // (context_length - 1)
        if self.rows_per_epoch == 0:
            raise ValueError(f"{len(documents)} documents have {self.n_tokens} tokens, too few to fill one "
                             f"row of {context_length}: add documents, lower the context length or hold "
                             "out another share")
        self.latest = None  # the latest epoch and its shuffle(): a memory of a pure function

    def shuffle(self, epoch):
        """The order of an epoch's documents, where in its stream each of them ends, an order of its rows."""
        if self.latest is None or self.latest[0] != epoch:
            generator = np.random.default_rng((self.seed, epoch))
            documents = generator.permutation(len(self.lengths))
            rows = generator.permutation(self.rows_per_epoch)
            self.latest = epoch, (documents, self.lengths[documents].cumsum(), rows)
        return self.latest[1]

    def row(self, i):
        """Row i of an endless supply -> tokens, doc_ids, targets, each (T,) int64.

        A pure function of (documents, context_length, seed, i). targets: the next token of the row where it
        is in the same document, or is the first after the anchor; else -100, as for the row's last token,
        even where its document goes on in the next row.
        """
        epoch, i = divmod(i, self.rows_per_epoch)
        order, ends, _ = self.shuffle(epoch)
        start = i * (self.context_length - 1)
        stop = start + self.context_length - 1
        here = slice(np.searchsorted(ends, start, side="right"), np.searchsorted(ends, stop) + 1)
        pieces = [np.array([self.bos])]
        for document, end in zip(order[here], ends[here]):  # those with a token in this row
            begin = end - self.lengths[document]
            piece = self.documents[document][max(start - begin, 0):stop - begin]
            piece = np.frombuffer(piece, np.uint8) if isinstance(piece, bytes) else np.array(piece, np.int64)
            pieces.append(np.append(piece, self.eos) if end <= stop else piece)
        tokens = np.concatenate(pieces, dtype=np.int64)
        doc_ids = np.repeat(np.arange(len(pieces)), [len(piece) for piece in pieces])
        targets = np.full_like(tokens, NO_TARGET)
        continues = doc_ids[1:] == doc_ids[:-1]
        continues[0] = True  # the anchor predicts the row's first token
        targets[:-1][continues] = tokens[1:][continues]
        return torch.from_numpy(tokens), torch.from_numpy(doc_ids), torch.from_numpy(targets)

    def shuffled_batch(self, i, n):
        """n rows for training -> tokens, doc_ids, targets, each (n, T) int64.

        From number i on in the shuffled order of each epoch's rows, so the first of them is not row(i).
        Neighbours in the stream are pieces of one document, too alike to learn from at once.
        """
        rows = []
        for j in range(i, i + n):
            epoch, j = divmod(j, self.rows_per_epoch)
            rows.append(self.row(epoch * self.rows_per_epoch + int(self.shuffle(epoch)[2][j])))
        return tuple(torch.stack(x) for x in zip(*rows))


class TrainerRows(torch.utils.data.Dataset):
    """PackedRows as the data set of a Trainer of Hugging Face transformers, for a model that was given to
    anchor_attention.

    Item i is row i -> {"input_ids", "doc_ids", "labels", "attention_mask"}, each (T,) int64; as many items as
    an epoch has rows. labels: the row's own tokens, as transformers shifts them itself; -100 where a token is
    nobody's target. attention_mask: ones, which TRL's SFTTrainer asks for.
    """

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return self.rows.rows_per_epoch

    def __getitem__(self, i):
        tokens, doc_ids, targets = self.rows.row(range(len(self))[i])  # range: IndexError behind the last
        labels = F.pad(targets[:-1], (1, 0), value=NO_TARGET)
        return {"input_ids": tokens, "doc_ids": doc_ids, "labels": labels,
                "attention_mask": torch.ones_like(tokens)}


# ------------------------------------------------------------------------------------------------------------
# The recall task


def recall_document(length, n_facts, seed, depth=None):
    """A document that hides facts among filler and asks for one of them at its end -> bytes of `length`.

    The needle in a haystack of the paper's RULER in miniature: with one fact the passkey task, with more the
    others distract. Fact: <KQ=7>. Question: <KQ?7>, whose answer is the last byte but one.
    seed: int or a sequence of ints. depth: where the wanted fact stands, from 0 (start) to 1 (just before the
    question); None: anywhere, as the others.
    ValueError: a length that cannot hold the facts and the question, or more facts than keys.
    """
    n_filler = length - 6 * n_facts - 6
    if n_filler < 0 or not 1 <= n_facts <= 26 * 26:
        raise ValueError(f"length is {length}, n_facts {n_facts}: expected 1 to 676 facts, and 6 bytes for "
                         "each and the question")
    generator = np.random.default_rng(seed)
    keys = [b"%c%c" % (65 + k // 26, 65 + k % 26) for k in generator.permutation(26 * 26)[:n_facts]]
    values = generator.integers(48, 58, n_facts)  # digits, which stand nowhere else
    letters = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz    ", dtype=np.uint8)
    filler = generator.choice(letters, n_filler).tobytes()
    places = generator.integers(0, n_filler, n_facts, endpoint=True)
    if depth is not None:
        places[0] = round(depth * n_filler)
    parts, begin = [], 0
    for i in np.argsort(places, kind="stable"):
        parts += [filler[begin:places[i]], b"<%s=%c>" % (keys[i], values[i])]
        begin = places[i]
    return b"".join(parts) + filler[begin:] + b"<%s?%c>" % (keys[0], values[0])


def recall_batch(context_length, n_rows, n_facts, seed, depth=None, packed=True):
    """Rows of recall documents -> tokens, doc_ids, targets, each (n_rows, T) int64.

    Only the answers are targets. packed: documents of random lengths fill the row; else one document of
    T - 1 tokens does.
    """
    shortest, generator, rows = 6 * n_facts + 6 + 16, np.random.default_rng(seed), []
    for _ in range(n_rows):
        tokens, doc_ids, targets = [BOS], [0], [NO_TARGET] * context_length
        lengths, left = [], context_length - 1
        while packed and left >= 2 * shortest:
            lengths.append(int(generator.integers(shortest, left - shortest, endpoint=True)))
            left -= lengths[-1]
        lengths.append(left)
        for length in generator.permutation(lengths).tolist():  # else the long ones would always come first
            document = recall_document(length, n_facts, generator.integers(2**31), depth)
            tokens += document
            doc_ids += [doc_ids[-1] + 1] * length
            targets[len(tokens) - 3] = document[-2]
        rows.append((tokens, doc_ids, targets))
    return tuple(torch.tensor(x) for x in zip(*rows))


# ------------------------------------------------------------------------------------------------------------
# The description of a corpus


def visible_share(doc_ids, attention):
    """The share of the causal pairs of these rows, doc_ids (B, T), that stay visible in an attention kind."""
    return int(visible_pairs(doc_ids, attention).sum()) / int(visible_pairs(doc_ids, "full").sum())


def describe(documents, context_lengths):
    """What a newcomer wants to know of a corpus, as text: sizes, a histogram, and the saving to expect."""
    lengths = np.array([len(d) for d in documents])
    tokens = int(lengths.sum()) + len(documents)
    lines = [f"{len(documents):,} documents, {tokens:,} tokens (bytes, and an EOS after each document)",
             f"bytes in a document: mean {lengths.mean():,.0f}, median {np.median(lengths):,.0f}, "
             f"shortest {lengths.min():,}, longest {lengths.max():,}",
             "",
             "length in bytes      documents"]
    buckets = np.bincount(np.log2(lengths).astype(int))
    for b in range(int(np.flatnonzero(buckets)[0]), len(buckets)):
        bar = "█" * round(40 * buckets[b] / buckets.max())
        lines.append(f"{2**b:>9,} - {2**(b + 1) - 1:<9,} {buckets[b]:>6,} {bar}")
    lines += ["", "share of causal pairs that stay visible, by context length"]
    fit = [T for T in context_lengths if T - 1 <= tokens]
    if not fit:
        return "\n".join([*lines, f"(too few tokens to fill one row of {min(context_lengths):,})"])
    packed = [PackedRows(documents, T, seed=0) for T in fit]
    sampled = [rows.shuffled_batch(0, min(rows.rows_per_epoch, 64))[1] for rows in packed]
    lines.append(" " * 16 + "".join(f"{T:>10,}" for T in fit))
    for attention in ATTENTIONS:
        shares = [visible_share(doc_ids, attention) for doc_ids in sampled]
        lines.append(f"{attention:<16}" + "".join(f"{share:>10.1%}" for share in shares))
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Describes a corpus: documents, lengths, saving to expect.")
    parser.add_argument("path", nargs="?", help=f"{SERVED}; default: the Python standard library")
    parser.add_argument("--context-length", type=int, nargs="+", default=[1024, 8192, 65536],
                        help="default: %(default)s")
    args = parser.parse_args()
    sys.stdout.reconfigure(errors="replace")
    try:
        print(describe(load_documents(args.path), args.context_length))
    except (ValueError, OSError) as error:
        parser.error(str(error))
