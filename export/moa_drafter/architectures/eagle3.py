"""An EAGLE-3 head (arXiv 2503.01840): one decoder layer over a token and hidden states of three layers of the target.

``g_i = fc(cat(a_i, b_i, c_i))``, the *feature* of token ``x_i``, is made of what enters these layers. From ``x_{i+1}``
and ``g_i`` the head computes ``y_{i+1}``, from which its own output matrix reads the next token; if the target has not
processed ``x_{i+1}``, ``y_{i+1}`` takes the place of ``g_{i+1}``. The first token has no feature before it: nothing
attends to it.

Heads are trained by ``moa-train``, and published, see :mod:`moa_drafter.eagle3_head`; the options of speculators' heads
are fields of :class:`moa_drafter.config.Eagle3Config`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from moa_drafter.config import Eagle3Config, Reads
from moa_drafter.device_module import StepModule
from moa_drafter.drafter import Drafter
from moa_drafter.llama import DecoderLayer, RMSNorm, rotate
from moa_drafter.target import Target
from moa_drafter.target_features import TargetStates
from moa_drafter.training.initialise import regress
from moa_drafter.training.target_parts import start_layer, start_norm
from moa_runtime.backends.eagle3 import Eagle3Backend, Eagle3Inputs, Eagle3Result

if TYPE_CHECKING:
    from moa_drafter.target import TargetLogits
    from moa_drafter.training.batch import Batch


class Eagle3Layer(DecoderLayer):
    """A decoder layer whose attention reads the normed embedding beside the normed feature."""

    def __init__(self, config: Eagle3Config) -> None:
        dims = config.decoder
        super().__init__(dims, config.rms_norm_eps)
        attention, width = self.self_attn, 2 * dims.hidden_size
        attention.q_proj = nn.Linear(width, dims.num_heads * dims.head_dim, bias=False)
        attention.k_proj = nn.Linear(width, dims.num_kv_heads * dims.head_dim, bias=False)
        attention.v_proj = nn.Linear(width, dims.num_kv_heads * dims.head_dim, bias=False)
        self.hidden_norm = RMSNorm(dims.hidden_size, config.rms_norm_eps)
        if config.qk_norm:
            attention.q_norm = RMSNorm(dims.head_dim, config.rms_norm_eps)
            attention.k_norm = RMSNorm(dims.head_dim, config.rms_norm_eps)
        self._norm_before_residual, self._qk_norm = config.norm_before_residual, config.qk_norm

    def inputs(self, embedded: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the attention's inputs ``[T, 2 * hidden]`` and the residual ``[T, hidden]``."""
        normed = self.hidden_norm(features)
        x = torch.cat((self.input_layernorm(embedded), normed), dim=-1)
        return x, normed if self._norm_before_residual else features

    def pair(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Compute keys and values ``[T, kv_heads, head_dim]`` of the attention's inputs."""
        attention = self.self_attn
        k, v = (
            part(x).unflatten(-1, (attention.dims.num_kv_heads, -1)) for part in (attention.k_proj, attention.v_proj)
        )
        return rotate(attention.k_norm(k) if self._qk_norm else k, *angles), v

    def output(
        self, x: Tensor, residual: Tensor, k: Tensor, v: Tensor, angles: tuple[Tensor, Tensor], mask: Tensor
    ) -> Tensor:
        """Compute the layer's output ``[Q, hidden]`` from the queries' inputs, residual and angles.

        Args:
            k, v: ``[S, kv_heads, head_dim]``.
            mask: boolean ``[Q, S]``, true where a query may look.
        """
        attention = self.self_attn
        q = attention.q_proj(x).unflatten(-1, (attention.dims.num_heads, attention.dims.head_dim))
        q = rotate(attention.q_norm(q) if self._qk_norm else q, *angles)
        x = residual + attention.attend(q, k, v, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Eagle3Drafter(Drafter):
    """The parameters of both halves, under the names of :func:`moa_drafter.drafter_weights.shapes_of`."""

    config: Eagle3Config

    def __init__(self, config: Eagle3Config) -> None:
        hidden, eps = config.decoder.hidden_size, config.rms_norm_eps
        super().__init__(config.vocab_size, config.draft_vocab_size, hidden)
        self.config = config
        joined = config.inputs * hidden
        self.fc = nn.Linear(joined, hidden, bias=False)
        if config.norm_before_fc:
            self.input_norm = RMSNorm(joined, eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(hidden, eps) for _ in range(config.inputs))
        self.layer = Eagle3Layer(config)
        self.norm = RMSNorm(hidden, eps)
        self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False)
        if config.own_embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, hidden)
        self.register_buffer("target_head", torch.empty(0), persistent=False)
        rotary = config.rotary
        self.register_buffer("_frequencies", torch.tensor(rotary.frequencies, dtype=torch.float32), persistent=False)
        self._factor = rotary.factor

    @property
    def reads(self) -> Reads:
        """Those of the memory rows."""
        return self.config.row_reads

    def bind_target(
        self, embedding: Tensor, head: Tensor, layers: Sequence[nn.Module] = (), logits: TargetLogits | None = None
    ) -> None:
        """Take the target's token embedding, unless the head has its own; its output matrix is always its own. The
        number of ``layers`` says which are read. Raises FitError if there are too few."""
        if layers:
            self.config = self.config.for_layers(len(layers))
        super().bind_target(embedding, head, layers, logits)
        if logits is not None:
            self.target_head = self.head
        self.head = self.lm_head.weight.detach()
        if self.config.own_embedding:
            self.embedding = self.embed_tokens.weight.detach()

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`Drafter.angles`; scaled as the configuration says."""
        angles = positions.float()[:, None] * self._frequencies
        angles = torch.cat((angles, angles), dim=-1)[:, None, :]
        return angles.cos() * self._factor, angles.sin() * self._factor

    def features(self, inner: Tensor) -> Tensor:
        """Compute features ``[T, hidden]`` from the target's hidden states ``[T, inputs, hidden]``."""
        return self.fc(self._joined(inner))

    def _joined(self, inner: Tensor) -> Tensor:
        """Compute what ``fc`` reads, ``[T, inputs * hidden]``."""
        if self.config.fc_norm:
            inner = torch.stack([norm(inner[:, n]) for n, norm in enumerate(self.fc_norm)], dim=1)
        joined = inner.flatten(1)
        return self.input_norm(joined) if self.config.norm_before_fc else joined

    def logits(self, hidden: Tensor) -> Tensor:
        """See :meth:`Drafter.logits`; bound for training, by the matrix that is trained."""
        return self.lm_head(hidden) if self._target_logits is not None else super().logits(hidden)

    def target_logits(self, hidden: Tensor) -> Tensor:
        """See :meth:`Drafter.target_logits`."""
        assert self._target_logits is not None
        return self._target_logits.of_tokens(hidden, self.target_head, self.draft_to_target)

    def predict(self, batch: Batch) -> Tensor:
        """See :meth:`Drafter.predict`; unrolled as it drafts (section 3.1): one pass for each depth, so as many as the
        longest segment has tokens.

        A query at depth d attends to the entries of true features up to depth 1 of its segment, then to its segment's
        own. A segment sees all features before it, even if fewer should be visible, and at depth 0 no more than at 1.
        """
        layer, positions, angles = self.layer, batch.positions, self.angles(batch.positions)
        earlier = self.features(batch.states.inner).roll(1, 0).masked_fill((positions == 0)[:, None], 0.0)
        x, residual = layer.inputs(self.embed(batch.tokens), earlier)
        entries = [layer.pair(x, angles)]
        depths, segments = _depths_in_segments(positions[batch.queries], batch.depths)
        order = depths.argsort(stable=True)
        passes = order.split(depths.bincount().tolist()[1:])
        predicted: list[Tensor] = []
        drafted = segments[:0]  # of each entry made from an estimate, the segment
        for depth, queries in enumerate(passes, 1):
            at = batch.queries[queries]
            own_angles = angles[0][at], angles[1][at]
            mask = batch.self_mask[at] & (positions <= (positions[at] - depth + 1)[:, None])
            # Only the first token of a conversation attends to itself.
            mask &= (positions > 0) | (torch.arange(len(positions), device=at.device) == at[:, None])
            if depth == 1:
                own = x[at], residual[at]
            else:
                # The previous query is one less deep in the same segment.
                before = predicted[-1][torch.searchsorted(passes[depth - 2], queries - 1)]
                own = layer.inputs(self.embed(batch.tokens[at]), before)
                entries.append(layer.pair(own[0], own_angles))
                drafted = torch.cat((drafted, segments[queries]))
                mask = torch.cat((mask, segments[queries][:, None] == drafted), dim=1)
            keys, values = (torch.cat(parts) for parts in zip(*entries, strict=True))
            hidden = layer.output(*own, keys, values, own_angles, mask)
            predicted.append(self.norm(hidden) if self.config.norm_output else hidden)
        found = torch.cat(predicted)[order.argsort()]
        return found if self.config.norm_output else self.norm(found)

    @torch.no_grad()
    def initialise(self, target: Target, samples: Iterable[tuple[Tensor, TargetStates]]) -> None:
        """Start as the best linear estimate of the next token's last hidden state, with parts of the target's layers:
        its first reads the embedding, its last the feature. The layer adds nothing at first."""
        dims, attention = self.config.decoder, self.layer.self_attn
        first, last = (DecoderLayer(dims, self.config.rms_norm_eps) for _ in range(2))
        start_layer(first, target.layers[0])
        start_layer(last, target.layers[-1])
        for name in ("q_proj", "k_proj", "v_proj"):
            halves = (getattr(layer.self_attn, name).weight for layer in (first, last))
            getattr(attention, name).weight.copy_(torch.cat(tuple(halves), dim=1))
        self.layer.input_layernorm.load_state_dict(first.input_layernorm.state_dict())
        self.layer.hidden_norm.load_state_dict(last.input_layernorm.state_dict())
        self.layer.post_attention_layernorm.load_state_dict(last.post_attention_layernorm.state_dict())
        self.layer.mlp.load_state_dict(last.mlp.state_dict())
        attention.o_proj.weight.zero_()
        self.layer.mlp.down_proj.weight.zero_()
        start_norm(self.norm, target.model.model)
        self.lm_head.weight.copy_(target.head[self.draft_to_target.to(target.head.device)])
        parts = [(self._joined(states.inner[:-1]), states.last[1:]) for _, states in samples]
        inputs, outputs = (torch.cat(each).double().cpu() for each in zip(*parts, strict=True))
        self.fc.weight.copy_(regress(inputs, outputs / self.norm.weight.double(), ridge=1e-2).T)

    def rows(self, states: TargetStates, positions: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`Drafter.rows`: the features, cut into halves of :attr:`Eagle3Config.row_shape`."""
        features = self.features(states.inner)
        first, second = features.unflatten(-1, (2, *self.config.row_shape)).unbind(-3)
        return first, second


def _depths_in_segments(positions: Tensor, depths: Tensor) -> tuple[Tensor, Tensor]:
    """Return the depth in its segment, from 1, and the segment of each query ``[Q]``, in the order of the text.

    A segment is a run of queries that see the same rows: positions 5, 6, 7 and 8 at depths 1, 2, 1 and 0 give depths
    1, 2, 1, 1 and segments 1, 1, 2, 3.
    """
    at = torch.arange(len(positions), device=positions.device)
    limits = positions - depths
    begins = torch.ones_like(at, dtype=torch.bool)
    begins[1:] = (positions.diff() != 1) | (limits.diff() != 0)
    starts = torch.where(begins, at, 0).cummax(0).values
    return at - starts + 1, begins.cumsum(0)


class Eagle3Module(StepModule):
    """One pass of the device half, which computes :class:`moa_runtime.backends.eagle3.Eagle3Result`."""

    drafter: Eagle3Drafter

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        queries: Tensor,
        features: Tensor,
        self_keys: Tensor,
        self_values: Tensor,
        self_mask: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Compute the pass; the exporter takes the inputs' names from here."""
        self._check_sizes(tokens, self_keys, self_mask)
        torch._check(features.shape[0] == tokens.shape[0])
        drafter, layer = self.drafter, self.drafter.layer
        x, residual = layer.inputs(self.embed(tokens), features)
        angles = drafter.angles(positions)
        keys, values = layer.pair(x, angles)
        own = torch.cat((self_keys, keys)), torch.cat((self_values, values))
        turned = angles[0][queries], angles[1][queries]
        hidden = layer.output(x[queries], residual[queries], *own, turned, self_mask[queries])
        normed = drafter.norm(hidden)
        top, logprobs = drafter.candidates(normed, self.top_k)
        return top, logprobs, keys, values, normed if drafter.config.norm_output else hidden


class TorchEagle3Pass:
    """A bound head in PyTorch and float32. Implements :class:`moa_runtime.backends.eagle3.Eagle3Pass`."""

    def __init__(self, drafter: Eagle3Drafter, *, top_k: int) -> None:
        self._module = Eagle3Module(drafter, top_k=top_k).eval()
        self.top_k, self.kv_shape = self._module.top_k, self._module.kv_shape
        self.hidden_size = drafter.config.decoder.hidden_size

    @torch.inference_mode()
    def __call__(self, inputs: Eagle3Inputs) -> Eagle3Result:
        """See :class:`moa_runtime.backends.eagle3.Eagle3Pass`."""
        found = self._module(*(torch.from_numpy(np.ascontiguousarray(array)) for array in vars(inputs).values()))
        return Eagle3Result(*(tensor.numpy() for tensor in found))


def torch_backend(drafter: Eagle3Drafter, *, top_k: int) -> Eagle3Backend:
    """Return the runtime's backend of a bound head, for ``top_k`` candidates per query."""
    return Eagle3Backend(TorchEagle3Pass(drafter, top_k=top_k))
