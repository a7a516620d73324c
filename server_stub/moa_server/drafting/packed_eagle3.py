"""The device half of an EAGLE-3 head for several conversations at once, in torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from moa_drafter.architectures.eagle3 import Eagle3Drafter
from moa_drafter.llama import rotate
from moa_runtime.backends.eagle3 import Eagle3Inputs, Eagle3Result
from moa_server.drafting.batched_model import SharedTargetWeights, attended, multiplied
from moa_server.engine.packed_linear import product, product_of


class PackedEagle3:
    """Computes what :class:`moa_drafter.architectures.eagle3.Eagle3Module` computes, for several passes at once, with
    matrices that are copied. Implements :class:`moa_server.drafting.batched_eagle3.BatchedEagle3Pass`.

    Args:
        drafter: need not be bound to its target.
        target: provides device and embedding, unless the head has its own.
        dtype: of the products.
        top_k: candidates per query, at most the draft vocabulary.
    """

    def __init__(self, drafter: Eagle3Drafter, target: SharedTargetWeights, dtype: torch.dtype, *, top_k: int) -> None:
        config, layer = drafter.config, drafter.layer
        self._attention: Any = layer.self_attn
        self.top_k = min(top_k, config.draft_vocab_size)
        self.kv_shape = (config.decoder.num_kv_heads, config.decoder.head_dim)
        self.hidden_size = config.decoder.hidden_size
        self._config, self._layer, self._angles, self._norm = config, layer, drafter.angles, drafter.norm
        self._dtype, self._device = dtype, target.device
        own = drafter.embed_tokens.weight if config.own_embedding else target.embedding
        self._embedding, self._tokens = own.detach(), drafter.draft_to_target.to(target.device)
        self._queries = product_of(dtype, self._attention.q_proj)
        self._keys_values = product_of(dtype, self._attention.k_proj, self._attention.v_proj)
        self._out = product_of(dtype, self._attention.o_proj)
        self._gate_up = product_of(dtype, layer.mlp.gate_proj, layer.mlp.up_proj)
        self._down = product_of(dtype, layer.mlp.down_proj)
        self._head = product(drafter.lm_head.weight.detach().to(dtype))

    def __call__(self, inputs: Eagle3Inputs) -> Eagle3Result:
        """See :class:`moa_runtime.backends.eagle3.Eagle3Pass`."""
        return self.together([inputs])[0]

    @torch.inference_mode()
    def together(self, passes: Sequence[Eagle3Inputs]) -> list[Eagle3Result]:
        """See :class:`moa_server.drafting.batched_eagle3.BatchedEagle3Pass`."""

        def moved(name: str) -> torch.Tensor:
            return torch.from_numpy(np.concatenate([getattr(each, name) for each in passes])).to(self._device)

        counts, asked = ([len(getattr(each, name)) for each in passes] for name in ("tokens", "queries"))
        firsts = np.cumsum([0, *counts[:-1]])
        at = np.concatenate([first + each.queries for first, each in zip(firsts, passes, strict=True)])
        queries, angles = torch.from_numpy(at).to(self._device), self._angles(moved("positions"))
        embedded = functional.embedding(moved("tokens"), self._embedding).float()
        x, residual = self._layer.inputs(embedded, moved("features"))
        keys, values = multiplied(self._keys_values, x, self._dtype).unflatten(-1, (2, *self.kv_shape)).unbind(1)
        q = multiplied(self._queries, x[queries], self._dtype).unflatten(-1, (-1, self.kv_shape[1]))
        if self._config.qk_norm:
            q, keys = self._attention.q_norm(q), self._attention.k_norm(keys)
        keys, q = rotate(keys, *angles), rotate(q, angles[0][queries], angles[1][queries])
        mixed = []
        for each, own, *new in zip(passes, q.split(asked), keys.split(counts), values.split(counts), strict=True):
            cached = (torch.from_numpy(half).to(self._device) for half in (each.self_keys, each.self_values))
            k, v = (torch.cat(both)[None] for both in zip(cached, new, strict=True))
            mask = torch.from_numpy(each.self_mask[each.queries]).to(self._device)
            mixed.append(attended(own[None], k, v, mask)[0])
        hidden = residual[queries] + multiplied(self._out, torch.cat(mixed), self._dtype)
        normed = self._layer.post_attention_layernorm(hidden)
        gate, up = multiplied(self._gate_up, normed, self._dtype).chunk(2, -1)
        hidden = hidden + multiplied(self._down, functional.silu(gate) * up, self._dtype)
        normed = self._norm(hidden)
        logits = multiplied(self._head, normed, self._dtype) * self._config.sharpness
        top, index = logits.topk(self.top_k, dim=-1)
        estimates = normed if self._config.norm_output else hidden
        parts = self._tokens[index], top - logits.logsumexp(dim=-1, keepdim=True), keys, values, estimates
        split = (part.split(sizes) for part, sizes in zip(parts, (asked, asked, counts, counts, asked), strict=True))
        return [Eagle3Result(*(part.cpu().numpy() for part in each)) for each in zip(*split, strict=True)]
