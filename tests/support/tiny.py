"""A seeded random target and drafter, small enough for fast tests: 4 layers, hidden size 64, 512 tokens."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moa_drafter.model import MoADrafter
    from moa_drafter.target import Target

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB_SIZE, DRAFT_VOCAB_SIZE = 512, 384
QUESTIONS = ("Name three colours.", "Why is the sky blue?")

# The shape of SmolLM2's template: a default system message, and a newline after the end-of-turn token.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nYou are tiny.<|im_end|>\\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_TEXT = """
The small model on the device proposes some tokens, and the large model on the server verifies them.
When the network goes away the device keeps writing from the last activations it has; when the network
comes back, the target checks what was written. A conversation is a committed prefix and a tentative
suffix, and only a verdict extends the prefix. Name three primary colours: red, yellow and blue. What is
the capital of France? The capital of France is Paris. Write a short story about a fox who lived in a
quiet forest near the river, where every morning the birds sang and the children walked to school with
their grandmother, carrying bread, apples, honey and a bottle of fresh water for the long afternoon.
"""


def make_tiny_target(
    folder: Path, *, seed: int = 0, head_dim: int = 16, hidden_size: int = 64, layers: int = 4
) -> Path:
    """Write a random Llama with its own byte-level tokenizer and chat template into ``folder``.

    Every one of the 512 token ids has a text. The weights are spread wide enough that the greedy
    choice is not a matter of rounding.

    Args:
        head_dim: numbers of an attention head; vLLM takes none below 32.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    bpe = _train_tokenizer()
    bos, eos = bpe.token_to_id("<|im_start|>"), bpe.token_to_id("<|im_end|>")
    config = LlamaConfig(
        hidden_size=hidden_size,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=512,
        initializer_range=0.15,
        tie_word_embeddings=False,
        bos_token_id=bos,
        eos_token_id=eos,
        pad_token_id=eos,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    (folder / "LICENSE").write_text("A licence, which travels with bundles.\n")
    PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        unk_token="<|endoftext|>",
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(folder)
    return folder


def make_tiny_rival(architecture: str, target_folder: Path, folder: Path, *, seed: int = 1) -> Path:
    """Write a random drafter of any architecture for the target of :func:`make_tiny_target` into ``folder``.

    Its draft vocabulary leaves out some tokens in the middle, so a forgotten draft-to-target map shows.
    """
    import torch

    from moa_drafter.architectures.registry import new_drafter
    from moa_drafter.checkpoint import save_checkpoint
    from moa_drafter.target import load_target

    target = load_target(str(target_folder))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        drafter = new_drafter(architecture, target, draft_vocab_size=DRAFT_VOCAB_SIZE, lsa_layers=2)
        drafter.draft_to_target.copy_(torch.randperm(VOCAB_SIZE)[:DRAFT_VOCAB_SIZE].sort().values)
    save_checkpoint(drafter, folder)
    return folder


def make_tiny_drafter(target_folder: Path, folder: Path, *, seed: int = 1) -> Path:
    return make_tiny_rival("moa", target_folder, folder, seed=seed)


def tiny_with_layers(drafter_folder: Path, target: Target, count: int, *, trained: bool = False) -> MoADrafter:
    """The drafter of :func:`make_tiny_drafter` with ``count`` of the target's last layers, bound to it.

    Trained copies are no longer the target's.
    """
    import torch

    from moa_drafter.checkpoint import load_checkpoint
    from moa_drafter.training.initialise import with_target_layers

    drafter = with_target_layers(load_checkpoint(drafter_folder), count, trained=trained)
    drafter.bind_target(target.embedding, target.head, target.layers)
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(2)
        drafter.norm.load_state_dict(target.model.model.norm.state_dict())
        if trained:
            drafter.start_copies(target.layers)
            for weight in drafter.tail.parameters():
                weight.mul_(1 + 0.1 * torch.randn_like(weight))
    return drafter.eval()


def make_tiny_bundle(
    folder: Path,
    target_folder: Path,
    drafter_folder: Path,
    writer: str,
    *,
    targets: tuple[str, ...] = ("onnx",),
    questions: Sequence[str] = QUESTIONS[:1],
    context: int = 2048,
    preset: str = "laptop",
) -> Path:
    """Write a bundle into ``folder``.

    Args:
        writer: "none", or "target" for the target itself in 8 bits.
        questions: on whose answers its graphs are compared; without any nothing is.
        context: see :class:`moa_export.targets.base.TargetOptions`.
        preset: the recipe's.
    """
    from moa_export.offline_model import WriterSettings
    from moa_export.pipeline import ExportSettings, export_bundle
    from moa_export.progress import Progress
    from moa_export.recipe import PRESETS
    from moa_export.targets.base import TargetOptions

    settings = ExportSettings(
        targets,
        drafter_folder,
        model=str(target_folder),
        recipe=PRESETS[preset],
        options=TargetOptions(context=context),
        questions=questions,
        checked=bool(questions),
        writer=WriterSettings(writer, bits=8),
    )
    export_bundle(folder, settings, Progress(sys.stderr, quiet=True))
    return folder


def _train_tokenizer():
    """A byte-level BPE of exactly :data:`VOCAB_SIZE` tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([_TEXT], trainer)
    if bpe.get_vocab_size() != VOCAB_SIZE:
        raise AssertionError(f"the tiny tokenizer has {bpe.get_vocab_size()} tokens, expected {VOCAB_SIZE}")
    return bpe
