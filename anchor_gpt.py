"""AnchorAttention in one file: a compact Llama-style transformer for rows of packed documents.

The paper is *When Precision Meets Position: BFloat16 Breaks Down RoPE in Long-Context Training* (Wang et al.,
TMLR 2025, arXiv 2411.13476). Read from top to bottom this file is the paper's method:

  1. who sees whom    a row is [anchor, document 1, document 2, ...]; four kinds of attention over it
  2. positions        position ids and RoPE, its angles and tables never in bfloat16
  3. attention        the same attention in two ways: by mask (the definition) and by document (fast)
  4. the model        pre-RMSNorm, grouped-query attention with RoPE, SwiGLU, tied embeddings
  5. elsewhere        the method in other people's code: Hugging Face transformers, rows packed by others
  6. pictures         `python anchor_gpt.py` draws the four kinds

Notable: the only attention kernel is PyTorch's scaled_dot_product_attention; there are no buffers, so
`model.bfloat16()` finds no rotation table to round; by document, nothing of size T x T is ever built; and
`torch.compile(model)` compiles once for all packings.

Shapes: B rows, T tokens a row, H query heads, H_kv key/value heads, D the head size, C = H * D, V tokens in
the vocabulary. doc_ids (B, T) int64 holds 0 for the anchor at index 0 and 1, 2, 3, ... for each document in
turn.
"""
import math
import sys
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

# ------------------------------------------------------------------------------------------------------------
# 1. Who sees whom

ATTENTIONS = ("full", "intra_doc", "intra_doc_reset", "anchor")


def unknown_attention(attention):
    kinds = ", ".join(ATTENTIONS)
    return ValueError(f"unknown attention kind {attention!r}: choose one of {kinds}; a kind of your own "
                      "has to be served here, too")


def check_doc_ids(doc_ids):
    if doc_ids.ndim != 2 or doc_ids.dtype != torch.int64 or doc_ids.numel() == 0:
        raise ValueError(f"doc_ids is {tuple(doc_ids.shape)} {doc_ids.dtype}, expected a non-empty (B, T) "
                         "torch.int64: for a single row pass doc_ids[None]")
    wrong = doc_ids < 1
    wrong[:, 0] = doc_ids[:, 0] != 0
    if wrong.any():
        b, t = wrong.nonzero()[0].tolist()
        raise ValueError(f"doc_ids[{b}, {t}] is {int(doc_ids[b, t])}: expected 0 at index 0, for the anchor "
                         "(the BOS token in front of the row), and 1, 2, 3, ... for the documents behind it")


def attention_mask(doc_ids, attention):
    """Which query may see which key: the definition of the four kinds (the paper's Figure 2).

    doc_ids (B, T) int64 -> bool (B, T, T); [b, i, j] is True where query i may see key j, the convention of
    scaled_dot_product_attention. Every kind is causal (j <= i) and lets every token see itself.
    ValueError: an unknown kind; doc_ids of another shape or dtype, or without the anchor in front.
    """
    check_doc_ids(doc_ids)
    B, T = doc_ids.shape
    causal = torch.ones(T, T, dtype=torch.bool, device=doc_ids.device).tril()
    same_document = doc_ids[:, :, None] == doc_ids[:, None, :]  # (B, T, T): of query and key
    key_is_anchor = doc_ids[:, None, :] == 0  # (B, 1, T)
    match attention:
        case "full":
            return causal.repeat(B, 1, 1)
        case "intra_doc" | "intra_doc_reset":
            return causal & same_document
        case "anchor":
            return causal & (same_document | key_is_anchor)
    raise unknown_attention(attention)


def document_lengths(doc_ids):
    """The lengths of the documents of each row, in order, the anchor's 1 first.

    doc_ids (B, T) int64 -> list of B lists of int, each summing to T. On CUDA this waits for the device: call
    it once a forward, not once a layer.
    ValueError: as attention_mask, and a document in more than one piece.
    """
    doc_ids = doc_ids.cpu()
    check_doc_ids(doc_ids)
    lengths = []
    for b, row in enumerate(doc_ids):
        ids, counts = row.unique_consecutive(return_counts=True)
        if len(ids.unique()) < len(ids):
            torn = next(int(i) for i in ids if (ids == i).sum() > 1)
            raise ValueError(f"document {torn} of row {b} is in more than one piece: its tokens must be "
                             'consecutive; give each piece an id of its own, or use attend="mask"')
        lengths.append(counts.tolist())
    return lengths


def visible_pairs(doc_ids, attention):
    """How many (query, key) pairs are visible in each row; over that of `full`, the share of the work that is
    left.

    doc_ids (B, T) int64 -> int64 (B,); a document of n tokens has n (n + 1) / 2 causal pairs.
    ValueError: an unknown kind, and as document_lengths.
    """
    pairs = []
    for lengths in document_lengths(doc_ids):
        T = sum(lengths)
        within_documents = sum(n * (n + 1) // 2 for n in lengths)
        match attention:
            case "full":
                pairs.append(T * (T + 1) // 2)
            case "intra_doc" | "intra_doc_reset":
                pairs.append(within_documents)
            case "anchor":
                pairs.append(within_documents + T - 1)
            case _:
                raise unknown_attention(attention)
    return torch.tensor(pairs)


# ------------------------------------------------------------------------------------------------------------
# 2. Positions: with RoPE a logit depends on the distance of query and key alone, if its angles are exact


def position_ids(doc_ids, attention):
    """The position of each token: its index in the row; for intra_doc_reset its index in its document, from
    0.

    doc_ids (B, T) int64 -> int64 (B, T). The anchor is at position 0 in every kind.
    ValueError: an unknown kind; doc_ids of another shape or dtype, or without the anchor in front.
    """
    check_doc_ids(doc_ids)
    index = torch.arange(doc_ids.shape[1], device=doc_ids.device).expand_as(doc_ids)
    match attention:
        case "full" | "intra_doc" | "anchor":
            return index
        case "intra_doc_reset":
            sorted_ids, order = doc_ids.sort(dim=1, stable=True)  # document after document
            within = index - torch.searchsorted(sorted_ids, sorted_ids)
            return torch.empty_like(doc_ids).scatter(1, order, within)
    raise unknown_attention(attention)


def rope_cos_sin(position_ids, head_dim, theta=10_000.0, dtype=torch.float32):
    """The tables of RoPE: cos and sin of position * theta^(-2i / head_dim) for i = 0 ... head_dim/2 - 1.

    position_ids (B, T) -> cos, sin, each (B, 1, T, head_dim // 2) of `dtype`. The angles are float64: in
    float32 they are off by up to 0.005 radians below position 131,072; and a float32 matmul is what autocast
    runs in bfloat16, where positions above 256 collapse onto each other.
    ValueError: an odd head_dim.
    """
    if head_dim % 2:
        raise ValueError(f"head_dim is {head_dim}, expected an even number: RoPE rotates pairs")
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float64, device=position_ids.device) / head_dim
    angles = position_ids[:, None, :, None].double() * theta**-exponent  # (B, 1, T, D/2)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def apply_rope(x, cos, sin, dtype=None):
    """Rotates each pair (i, i + D/2) of x by its position's angle i (the pair layout of Llama checkpoints in
    Hugging Face form).

    x (B, H, T, D), cos and sin (B, 1, T, D // 2) -> (B, H, T, D) of `dtype`, by default x's. Computed in the
    promoted dtype of x and cos, then rounded. With bfloat16 x, bfloat16 tables are the paper's failing case;
    float32 tables remove their share of the error, but a bfloat16 result still has 8 bits (`bench.py rope`
    shows both).
    """
    x1, x2 = x.chunk(2, dim=-1)  # each (B, H, T, D/2)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).to(dtype or x.dtype)


# ------------------------------------------------------------------------------------------------------------
# 3. Attention, in two ways

# PyTorch's backward of bfloat16 attention is slow on a CPU. One causal block of 4 heads of 64, forward and
# backward, took in bfloat16, over its time in float32: 31 tokens 1.66, 201 1.17, 301 1.04, 401 0.99, 513 0.90
# (AMD EPYC with AVX-512 bf16; an Intel Xeon with AMX crosses 1 at 600). Up to this length float32 is as fast,
# and more precise.
FLOAT32_UP_TO = 384


def causal(q, k, v, dtype, scale=None):
    """Plain causal attention, in `dtype`; on a CPU a short bfloat16 block in float32.

    q (B, H, n, D), k and v (B, H_kv, n, D) -> (B, H, n, D) of `dtype`.
    """
    attend = partial(F.scaled_dot_product_attention, is_causal=True, scale=scale, enable_gqa=True)
    if dtype == torch.bfloat16 and q.device.type == "cpu" and q.shape[2] <= FLOAT32_UP_TO:
        with torch.autocast("cpu", enabled=False):  # else it would cast them back
            return attend(q.float(), k.float(), v.float()).to(dtype)
    return attend(q.to(dtype), k.to(dtype), v.to(dtype))


def causal_blocks(q, k, v, lengths, attention, scale=None):
    """Attention as independent causal blocks, one a document: the work falls from T^2 to the sum of the
    documents' n^2, and nothing of size T x T exists.

    In `anchor`, the queries of a document see the anchor and their document up to themselves: plain causal
    attention over [anchor; document]. So each document gets a copy of the anchor's q, k and v in front; the
    query only because is_causal wants as many queries as keys. (And since the anchor sees only itself, at
    position 0, in every layer, its k and v are those it would have in front of the document alone.)

    q (B, H, T, D), k and v (B, H_kv, T, D), rotated; lengths: document_lengths(doc_ids) -> (B, H, T, D).
    ValueError: an unknown kind.
    """
    if attention == "full":
        return causal(q, k, v, v.dtype, scale)
    if attention not in ("intra_doc", "intra_doc_reset", "anchor"):
        raise unknown_attention(attention)

    def block(qkv):
        q, k, v_ = qkv.split((H, H_kv, H_kv), dim=1)
        return causal(q, k, v_, v.dtype, scale)  # (1, H, n, D)

    H, H_kv = q.shape[1], k.shape[1]
    rows = []
    for row, row_lengths in zip(torch.cat((q, k, v), dim=1).split(1), lengths):
        # Split, not sliced: the backward of every slice would allocate a zero tensor of the whole length.
        anchor, *docs = row.split(row_lengths, dim=2)  # each (1, H + 2 H_kv, n, D)
        # All copies come from one `expand`: its backward is one sum, which accumulates in float32. Handing
        # out the anchor itself again and again would add its gradients up in bfloat16, rounding after each.
        copies = anchor.expand(-1, -1, len(docs), -1).split(1, dim=2)
        outputs = [block(anchor)]
        for copy, doc in zip(copies, docs):
            if attention == "anchor":
                y = block(torch.cat((copy, doc), dim=2))[:, :, 1:]  # without the output of the copied query
            else:
                y = block(doc)
            outputs.append(y)
        rows.append(torch.cat(outputs, dim=2))  # (1, H, T, D)
    return torch.cat(rows)


class PreparedAttention:
    """Who sees whom in a batch, worked out once and then called by every layer: attend(q, k, v).

    doc_ids (B, T) int64, on any device; attention: one of ATTENTIONS; attend: "document" or "mask"; device:
    where q, k and v will be, for the mask.
    q (B, H, T, D), k and v (B, H_kv, T, D), rotated; H_kv divides H -> (B, H, T, D) of v's dtype.
    scale: what the logits are multiplied by, D^-0.5 unless told otherwise.
    ValueError: an unknown kind; doc_ids as document_lengths or attention_mask say; other rows than doc_ids'.
    """

    def __init__(self, doc_ids, attention, attend="document", device="cpu"):
        self.attention, self.shape = attention, tuple(doc_ids.shape)
        self.lengths = document_lengths(doc_ids) if attend == "document" else None
        self.mask = attention_mask(doc_ids.to(device), attention)[:, None] if attend == "mask" else None

    # Kept out of compiled graphs: lengths differ from packing to packing, and each would be compiled anew.
    @torch.compiler.disable
    def __call__(self, q, k, v, scale=None):
        if (q.shape[0], q.shape[2]) != self.shape:
            raise ValueError(f"doc_ids is {self.shape}, but q has {q.shape[0]} rows of {q.shape[2]} tokens: "
                             "pass the doc_ids of these rows")
        if self.mask is None:
            return causal_blocks(q, k, v, self.lengths, self.attention, scale)
        return F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, attn_mask=self.mask,
                                              scale=scale, enable_gqa=True)


def attend_by_mask(q, k, v, doc_ids, attention):
    """Attention by one dense mask: the definition, quadratic in T, what by document is tested against.

    Shapes and errors as PreparedAttention.
    """
    return PreparedAttention(doc_ids, attention, "mask", q.device)(q, k, v)


def attend_by_document(q, k, v, doc_ids, attention):
    """Attention by causal_blocks: the values and gradients of attend_by_mask, and the default.

    Shapes and errors as PreparedAttention.
    """
    return PreparedAttention(doc_ids, attention, "document")(q, k, v)


# ------------------------------------------------------------------------------------------------------------
# 4. The model


@dataclass
class GPTConfig:
    """Everything that determines a model. ValueError: sizes that do not fit, an unknown kind or way."""
    vocab_size: int = 258
    n_layer: int = 4
    n_head: int = 4
    n_kv_head: int = 4
    n_embd: int = 256
    n_hidden: int = 688
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    attention: str = "anchor"
    attend: str = "document"  # or "mask"
    context_length: int = 1024  # the T it is trained on; forward takes any T, generate stays within this one
    checkpoint_activations: bool = False  # keep a block's input alone, compute the rest again

    def __post_init__(self):
        if self.attention not in ATTENTIONS:
            raise unknown_attention(self.attention)
        if self.attend not in ("document", "mask"):
            raise ValueError(f'unknown way to attend {self.attend!r}: choose "document" or "mask"')
        for name in ("vocab_size", "n_layer", "n_head", "n_kv_head", "n_embd", "n_hidden", "rope_theta",
                     "norm_eps"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}, expected more than 0")
        if self.context_length < 2:
            raise ValueError(f"context_length is {self.context_length}, expected at least 2: the anchor "
                             "and a token")
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd {self.n_embd} is not divisible by n_head {self.n_head}: change either")
        if self.n_embd // self.n_head % 2:
            raise ValueError(f"the head size n_embd / n_head = {self.n_embd} / {self.n_head} = "
                             f"{self.n_embd // self.n_head} is odd: RoPE rotates pairs, make it even")
        if self.n_head % self.n_kv_head:
            raise ValueError(f"n_head {self.n_head} is not divisible by n_kv_head {self.n_kv_head}: each "
                             "key/value head serves an equal number of query heads")


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.head_dim = config.n_embd // config.n_head
        n_heads = config.n_head + 2 * config.n_kv_head  # of queries, keys and values together
        self.qkv = nn.Linear(config.n_embd, n_heads * self.head_dim, bias=False)
        self.proj = nn.Linear(config.n_embd, config.n_embd, bias=False)

    def forward(self, x, cos, sin, attend):
        """x (B, T, C), cos and sin (B, 1, T, D/2), attend(q, k, v) -> (B, T, C)."""
        B, T, C = x.shape
        H, H_kv = self.config.n_head, self.config.n_kv_head
        heads = self.qkv(x).view(B, T, H + 2 * H_kv, self.head_dim).transpose(1, 2)  # (B, H + 2 H_kv, T, D)
        qk, v = heads.split((H + H_kv, H_kv), dim=1)
        # A CPU attends to short documents in float32 (see `causal`): no need to round what is rotated in
        # between.
        q, k = apply_rope(qk, cos, sin, cos.dtype if x.device.type == "cpu" else None).split((H, H_kv), dim=1)
        y = attend(q, k, v)  # (B, H, T, D)
        return self.proj(y.transpose(1, 2).reshape(B, T, C))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_up = nn.Linear(config.n_embd, 2 * config.n_hidden, bias=False)
        self.proj = nn.Linear(config.n_hidden, config.n_embd, bias=False)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.proj(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.n_embd, config.norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.n_embd, config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x, cos, sin, attend):
        x = x + self.attention(self.attention_norm(x), cos, sin, attend)
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.n_embd)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = nn.RMSNorm(config.n_embd, config.norm_eps)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.head.weight = self.embedding.weight
        for name, p in self.named_parameters():
            if p.ndim == 2:  # as nanoGPT: the sum over the residual stream keeps its size at any depth
                std = 0.02 / math.sqrt(2 * config.n_layer) if name.endswith("proj.weight") else 0.02
                nn.init.normal_(p, std=std)

    # Kept out of compiled graphs, like the attention itself: doc_ids differ from batch to batch.
    @torch.compiler.disable
    def prepare(self, tokens, doc_ids):
        """What is the same in every layer -> who sees whom and the rotation's tables: (attend, cos, sin)."""
        config = self.config
        if tokens.ndim != 2:
            raise ValueError(f"tokens is {tuple(tokens.shape)}, expected (B, T): for a single row pass "
                             "tokens[None]")
        if doc_ids is None:
            doc_ids = torch.ones_like(tokens, device="cpu")
            doc_ids[:, 0] = 0
        if doc_ids.shape != tokens.shape:
            raise ValueError(f"doc_ids is {tuple(doc_ids.shape)}, expected the shape of tokens, "
                             f"{tuple(tokens.shape)}")
        doc_ids = doc_ids.cpu()
        attend = PreparedAttention(doc_ids, config.attention, config.attend, tokens.device)
        positions = position_ids(doc_ids, config.attention)
        if tokens.is_cuda:
            positions = positions.pin_memory().to(tokens.device, non_blocking=True)  # without waiting for it
        # Elsewhere the tables are made on the CPU: Apple's GPUs have no float64.
        dtype = torch.promote_types(self.embedding.weight.dtype, torch.float32)  # never below float32
        cos, sin = rope_cos_sin(positions, config.n_embd // config.n_head, config.rope_theta, dtype)
        return attend, cos.to(tokens.device), sin.to(tokens.device)

    def forward(self, tokens, doc_ids=None, targets=None):
        """tokens (B, T) int64, each row an anchor and its documents -> logits (B, T, V), and the loss or
        None.

        doc_ids (B, T) int64, on any device (read on the CPU: from CUDA that waits for the device); None means
        one document a row after its anchor. targets (B, T) int64: the loss is the mean cross-entropy in nats,
        in float32, over the targets other than -100 (0 where there is none).
        ValueError: tokens or doc_ids of another shape, and as document_lengths (by document) or
        attention_mask (by mask).
    """
        attend, cos, sin = self.prepare(tokens, doc_ids)
        x = self.embedding(tokens)  # (B, T, C)
        for block in self.blocks:
            if self.config.checkpoint_activations:
                x = checkpoint(block, x, cos, sin, attend, use_reentrant=False)
            else:
                x = block(x, cos, sin, attend)
        logits = self.head(self.norm(x))  # (B, T, V)
        if targets is None:
            return logits, None
        nats = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=-100,
                               reduction="sum")
        return logits, nats / (targets != -100).sum().clamp(min=1)

    @torch.no_grad()
    def generate(self, tokens, max_new_tokens, temperature=1.0, top_k=None):
        """Continues each row by max_new_tokens sampled tokens; temperature 0 always takes the likeliest.

        tokens (B, T) int64, the anchor first -> (B, T + max_new_tokens). Once a row outgrows context_length,
        the model sees the anchor and the latest tokens: the oldest after the anchor are dropped, and
        positions count anew. top_k: sample from the k likeliest tokens only. ValueError: a negative
        temperature, a top_k below 1.
    """
        if temperature < 0 or top_k is not None and top_k < 1:
            raise ValueError(f"temperature is {temperature}, top_k {top_k}: expected 0 or more, and at least "
                             "1 or None")
        for _ in range(max_new_tokens):
            seen = tokens
            if tokens.shape[1] > self.config.context_length:
                seen = torch.cat((tokens[:, :1], tokens[:, -(self.config.context_length - 1):]), dim=1)
            logits = self(seen)[0][:, -1].float()  # (B, V)
            if temperature == 0:
                new = logits.argmax(dim=-1, keepdim=True)
            else:
                if top_k is not None:
                    kth = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
                    logits = logits.masked_fill(logits < kth, -math.inf)
                new = torch.multinomial((logits / temperature).softmax(dim=-1), 1)
            tokens = torch.cat((tokens, new), dim=1)
        return tokens


# ------------------------------------------------------------------------------------------------------------
# 5. In other people's code


def doc_ids_from_separators(tokens, separator):
    """The doc_ids of rows that other code has packed: an anchor, then documents, a separator behind each.

    tokens (B, T) int64 -> int64 (B, T). A row may start in the middle of a document and end in another, and
    the anchor may be the separator token itself, as in GPT-2.
    """
    ends = tokens[:, 1:] == separator
    doc_ids = 1 + ends.cumsum(dim=1) - ends.long()  # a separator belongs to the document that it ends
    return F.pad(doc_ids, (1, 0))


def check_plain_attention(module, query, key, attention_mask, dropout, options):
    """Refuses what transformers may ask for beyond causal softmax(scale q k) v. ValueError."""
    config, layer, T = module.config, type(module).__name__, query.shape[2]
    if not (getattr(config, "rope_parameters", None) or getattr(config, "rope_theta", None)):
        raise ValueError(f"{layer} has no RoPE: anchor attention is for models that rotate queries and keys")
    others = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if others or not getattr(module, "is_causal", True):
        raise ValueError(f"{layer} is of a model with {sorted(others) or 'attention that is not causal'}: "
                         "documents would see each other there")
    asked = {name: options.get(name) for name in ("softcap", "s_aux", "sinks", "position_bias", "indices")}
    asked |= {"dropout": dropout or None, "attention_mask": attention_mask}
    window = options.get("sliding_window", getattr(config, "sliding_window", None))
    if window and window < T:  # else it is switched off, or hides nothing
        asked["sliding_window"] = window
    for name, value in asked.items():
        if value is not None:
            raise ValueError(f"{layer} asks for attention with {name} = {value!r:.40}, which anchor "
                             "attention does not have")
    if key.shape[2] != T:
        raise ValueError(f"{layer} got {T} queries and {key.shape[2]} keys: expected whole rows, without a "
                         "cache")


def hugging_face_attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, doc_ids=None,
                           **options):
    """Anchor attention as transformers' AttentionInterface calls it; `anchor_attention` registers it there.

    query (B, H, T, D), key and value (B, H_kv, T, D), already rotated -> (B, T, H, D), contiguous, and None
    for the weights. doc_ids (B, T) int64, or as prepared by `anchor_attention` once for all layers.
    ValueError: no doc_ids or of another shape, and as check_plain_attention.
    """
    if doc_ids is None:
        raise ValueError(f"{type(module).__name__} got no doc_ids: call model(tokens, doc_ids=doc_ids); if "
                         "that is what you did, this model does not hand them down to its layers, so it "
                         "cannot be served")
    check_plain_attention(module, query, key, attention_mask, dropout, options)
    attend = doc_ids if isinstance(doc_ids, PreparedAttention) else PreparedAttention(doc_ids, "anchor")
    D_v = value.shape[3]
    if D_v != query.shape[3]:  # DeepSeek's values have smaller heads than its queries and keys
        value = F.pad(value, (0, query.shape[3] - D_v))
    return attend(query, key, value, scaling)[..., :D_v].transpose(1, 2).contiguous(), None


@torch.compiler.disable
def prepare_doc_ids(model, args, kwargs):
    """Before each forward of a model given to anchor_attention: nothing is ignored without a word."""
    name, implementation = type(model).__name__, model.config._attn_implementation
    doc_ids = kwargs.get("doc_ids")
    if implementation != "anchor" and doc_ids is not None:
        raise ValueError(f"{name} would ignore doc_ids, for its attention is {implementation!r} now: call "
                         "anchor_attention(model) again")
    if implementation != "anchor":
        return args, kwargs
    if doc_ids is None:
        raise ValueError(f"{name} got no doc_ids: call model(tokens, doc_ids=doc_ids). For inference, where "
                         "one document needs only causal attention, first call "
                         'model.set_attn_implementation("sdpa")')
    if kwargs.get("position_ids") is not None:
        raise ValueError(f"{name} got position_ids: leave them out, in anchor attention they run on over the "
                         "row")
    padding = kwargs.get("attention_mask")
    if padding is not None and padding.ndim == 2 and not padding[:, 0].all():
        raise ValueError(f"{name} got rows padded on the left: the anchor has to be at index 0, so pad on "
                         "the right or, better, fill the rows")
    if not isinstance(doc_ids, PreparedAttention):  # by the model around this one
        doc_ids = PreparedAttention(doc_ids, "anchor")
    return args, kwargs | {"doc_ids": doc_ids}


def anchor_attention(model):
    """Gives a causal language model of Hugging Face transformers anchor attention, proves it -> the model.

    Then call model(tokens, doc_ids=doc_ids), doc_ids (B, T) int64, best on the CPU, where it is read; padding
    is a document like any other. transformers does not save this with the model: call it again after
    from_pretrained.
    ValueError: a model that cannot be served, which is left as it was; later a call without doc_ids.
    """
    import transformers  # no requirement of this project: whoever calls this has it
    if int(transformers.__version__.split(".")[0]) < 5:
        raise ValueError(f"transformers {transformers.__version__} is too old, its models hand down a mask "
                         "of their own: pip install 'transformers>=5'")
    transformers.AttentionInterface.register("anchor", hugging_face_attention)
    before = model.config._attn_implementation
    hook = model.register_forward_pre_hook(prepare_doc_ids, with_kwargs=True)
    try:
        model.set_attn_implementation("anchor")
        if model.config._attn_implementation != "anchor":
            raise ValueError("it does not ask transformers' AttentionInterface for its attention")
        prove_anchor_attention(model)
    except Exception as error:  # a model that is not made for this may fail anywhere inside transformers
        hook.remove()
        model.set_attn_implementation(before)
        raise ValueError(f"{type(model).__name__} cannot be given anchor attention: {type(error).__name__}: "
                         f"{error}") from error
    return model


def prove_anchor_attention(model):
    """Computes on a row of two documents which token's embedding reaches which document's logits.

    A gradient is exactly 0 where nothing leads, in any dtype and through layers of any type.
    ValueError: a token reaches a document that it should not, or does not reach one that it should.
    """
    embedded = []

    def start_here(module, args, output):
        embedded.append(output.detach().requires_grad_())
        return embedded[-1]
    tokens, doc_ids = torch.arange(1, 8)[None], torch.tensor([[0, 1, 1, 1, 2, 2, 2]])
    hook = model.get_input_embeddings().register_forward_hook(start_here)
    modes = {module: module.training for module in model.modules()}
    try:
        with torch.enable_grad():
            output = model.eval()(tokens.to(model.device), doc_ids=doc_ids, use_cache=False)
            logits = output.logits[0]  # (T, V)
        for document in (1, 2):
            own = doc_ids[0] == document
            power = logits[own.to(logits.device)].float().square().sum()
            gradient, = torch.autograd.grad(power, embedded[0], retain_graph=True)
            reaches = (gradient[0] != 0).any(dim=-1).cpu()  # (T,)
            should = own | (doc_ids[0] == 0)
            for t in (reaches != should).nonzero()[:, 0].tolist():
                source = f"document {int(doc_ids[0, t])}" if t else "the anchor"
                verb = "does not reach" if should[t] else "reaches"
                raise ValueError(f"{source} {verb} document {document}: not every layer asks transformers' "
                                 "AttentionInterface for its attention")
    finally:
        hook.remove()
        for module, training in modes.items():
            module.training = training


# ------------------------------------------------------------------------------------------------------------
# 6. Pictures


def draw_mask(visible, doc_ids):
    """One row's mask as text, a line a query: ██ same document, ▓▓ the anchor, ░░ another document, · hidden.

    visible (T, T) bool, doc_ids (T,) int64 -> str of T lines, two characters a key.
    """
    def cell(i, j):
        if not visible[i, j]:
            return "· "
        return "██" if doc_ids[i] == doc_ids[j] else "▓▓" if doc_ids[j] == 0 else "░░"
    T = len(doc_ids)
    return "\n".join("".join(cell(i, j) for j in range(T)) for i in range(T))


def figure():
    """The paper's Figure 2 as text: visible pairs and position ids of each kind, for three documents."""
    doc_ids = torch.tensor([[0, 1, 1, 1, 2, 2, 2, 2, 3, 3]])
    names = ["A", "a", "a", "a", "b", "b", "b", "b", "c", "c"]
    panels = []
    for attention in ATTENTIONS:
        visible = attention_mask(doc_ids, attention)[0]
        picture = draw_mask(visible, doc_ids[0]).split("\n")
        panels.append([f"   {attention}", "   " + " ".join(names)]
                      + [f"{name}  {line}" for name, line in zip(names, picture)]
                      + ["   " + " ".join(map(str, position_ids(doc_ids, attention)[0].tolist()))])
    lines = ["A row: the anchor A, then documents a, b and c. Down: the query. Across: the keys it sees.",
             "██ same document   ▓▓ the anchor   ░░ another document   ·  hidden   below: position ids"]
    for left, right in (panels[:2], panels[2:]):
        lines += [""] + [f"{x:<30}{y}".rstrip() for x, y in zip(left, right)]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # a terminal without block characters shows question marks
    print(figure())
