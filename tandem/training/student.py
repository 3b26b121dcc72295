"""The drafter that learns: a fresh one of each method in the target's shape, or one that was published."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, TypeAlias, cast

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from engine.heads import dflash
from engine.heads.dflash import DFlashConfig, DFlashHead, Reach
from engine.heads.dspark import MARKOV_TYPES, DSparkConfig, DSparkHead
from engine.heads.eagle import EagleConfig, EagleHead
from engine.heads.eagle3 import Eagle3Config, Eagle3Head, default_layers
from engine.heads.files.checkpoint import read_head
from engine.heads.head import DraftHead
from engine.heads.layer import LayerConfig, RopeConfig
from engine.heads.medusa import MedusaConfig, MedusaHeads
from engine.heads.mlp_speculator import MlpSpeculator, MlpSpeculatorConfig
from engine.heads.mtp import MtpHead
from specdec.errors import InvalidRequest
from specdec.methods import TRAINABLE, method_of
from tandem.training.block import NUM_ANCHORS, unroll_blocks
from tandem.training.draft_vocabulary import draft_ids, most_frequent
from tandem.training.lesson import Lessons
from tandem.training.mtp import create_mtp, unroll_mtp
from tandem.training.parallel import as_parallel, unroll_parallel
from tandem.training.settings import TrainSettings
from tandem.training.unroll import Guess, unroll_draft, unroll_eagle, unroll_medusa, unroll_mlp

Module: TypeAlias = DraftHead | LlamaForCausalLM

#: Share of tokens published EAGLE-3 heads can draft, at most.
MAX_DRAFT_VOCAB_SIZE = 32_000
NUM_UNROLL_STEPS = 4
NUM_PREDICT = 4
#: Of DFlash and DSpark heads.
NUM_BLOCK_STATES = 5
BLOCK_SIZE = 8
MARKOV_RANK = 64


@dataclass(frozen=True)
class Student:
    """A drafter under training, and how it is asked."""

    module: Module
    unroll: Callable[[Any, Lessons, int], Iterator[Guess]]
    #: Steps that are trained, and the most that can be asked for.
    num_steps: int
    #: Sizes of its vocabularies.
    vocab_sizes: tuple[int, ...]
    max_steps: int | None = None
    #: The target's ids to the draft's, int64 [V], -1 where it has none; None where the vocabularies are the same.
    to_draft: Tensor | None = None

    def guesses(self, lesson: Lessons, num_steps: int) -> Iterator[Guess]:
        """What it drafts in each of `num_steps` steps from every position."""
        return self.unroll(self.module, lesson, num_steps)

    def trainable(self) -> dict[str, nn.Parameter]:
        """The parameters that learn, by name."""
        return {name: value for name, value in self.module.named_parameters() if value.requires_grad}


def layers_read(settings: TrainSettings, target: PreTrainedModel) -> tuple[int, ...]:
    """The target's hidden states the method reads: those of `start_from` where that is given.

    EAGLE-3's usual early, middle and late ones are three in targets of nine layers or more; below that, states spread
    evenly over the layers take their place. DFlash and DSpark read five of larger targets.

    Raises:
        InvalidRequest: `layers` are not those of `start_from`.
    """
    if settings.method not in ("eagle3", "dflash", "dspark"):
        return () if settings.method == "draft" else (-1,)
    if settings.start_from is not None:
        layers = _load_head(settings, settings.start_from).hidden_state_layers
        if settings.layers not in (None, layers):
            raise InvalidRequest(f"start_from reads the hidden states {list(layers)}: leave out layers", param="layers")
        return layers
    if settings.layers is not None:
        return settings.layers
    count = target.config.get_text_config().num_hidden_layers
    if settings.method != "eagle3" and count > NUM_BLOCK_STATES + 3:
        return dflash.default_layers(count, NUM_BLOCK_STATES)
    usual = default_layers(count)
    if usual[0] < usual[1] < usual[2]:
        return usual
    return tuple(round((i + 1) * (count - 1) / 3) for i in range(3))


def make_student(settings: TrainSettings, target: PreTrainedModel, counts: Tensor, num_tokens: int = 0) -> Student:
    """A student on the target's device, in float32.

    `counts` int64 [V]: how often the target writes each token, which decides about EAGLE-3's vocabulary. `num_tokens`:
    those of the tokenizer; the first id behind them is the mask of a draft that drafts in parallel.

    Raises:
        InvalidRequest: `start_from` holds another method.
    """
    torch.manual_seed(settings.seed)
    start = settings.start_from
    kind = _TRAINERS[settings.method]
    module = kind.create(settings, target, counts) if start is None else _load(settings, start)
    if settings.parallel is not None:
        module = as_parallel(cast("LlamaForCausalLM", module), num_tokens)
    nn.Module.to(module, target.device, torch.float32).train()
    for parameter in module.parameters():
        parameter.requires_grad_(True)
    return kind.student(module, settings, target.config.get_text_config().vocab_size)


def _eagle3_student(head: Eagle3Head, settings: TrainSettings, vocab_size: int) -> Student:
    _freeze_shared(head)
    token_ids = head.t2d.nonzero()[:, 0]
    whole = len(token_ids) == head.config.vocab_size
    to_draft = None if whole else draft_ids(token_ids.cpu(), head.config.vocab_size).to(head.t2d.device)
    steps = settings.unroll_steps or NUM_UNROLL_STEPS
    return Student(head, unroll_eagle, steps, (vocab_size, len(token_ids)), to_draft=to_draft)


def _block_student(head: DFlashHead, settings: TrainSettings, vocab_size: int) -> Student:
    _freeze_shared(head)
    token_ids = head.t2d.nonzero()[:, 0]
    whole = len(token_ids) == head.config.vocab_size
    steps = head.config.max_tokens
    return Student(
        head,
        partial(unroll_blocks, num_anchors=settings.num_anchors or NUM_ANCHORS),
        steps,
        (vocab_size, len(token_ids)),
        max_steps=steps,
        to_draft=None if whole else draft_ids(token_ids.cpu(), vocab_size).to(head.t2d.device),
    )


def _eagle_student(head: EagleHead, settings: TrainSettings, vocab_size: int) -> Student:
    _freeze_shared(head)
    return Student(head, unroll_eagle, settings.unroll_steps or NUM_UNROLL_STEPS, (vocab_size,))


def _mtp_student(head: MtpHead, settings: TrainSettings, vocab_size: int) -> Student:
    for name in head.shared_names:
        head.get_parameter(name).requires_grad_(False)
    return Student(head, unroll_mtp, settings.unroll_steps or NUM_UNROLL_STEPS, (vocab_size,))


def _medusa_student(heads: MedusaHeads, settings: TrainSettings, vocab_size: int) -> Student:
    return Student(heads, unroll_medusa, len(heads), (vocab_size,), max_steps=len(heads))


def _mlp_student(head: MlpSpeculator, settings: TrainSettings, vocab_size: int) -> Student:
    steps = head.config.n_predict
    return Student(head, unroll_mlp, steps, (vocab_size,), max_steps=steps)


def _draft_student(model: LlamaForCausalLM, settings: TrainSettings, vocab_size: int) -> Student:
    if settings.parallel is not None:
        sizes, steps = (vocab_size, model.config.vocab_size), settings.parallel
        return Student(model, unroll_parallel, steps, sizes, max_steps=steps)
    return Student(model, unroll_draft, 1, (vocab_size,))


def _freeze_shared(head: EagleHead | Eagle3Head | DFlashHead) -> None:
    """What is the target's stays as it is."""
    head.embed_tokens.weight.requires_grad_(head.config.owns_embeddings)
    head.lm_head.weight.requires_grad_(not isinstance(head, EagleHead) and head.config.owns_lm_head)


def _load(settings: TrainSettings, folder: str) -> Module:
    if settings.method == "draft":
        draft: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return draft
    return _load_head(settings, folder)


def _load_head(settings: TrainSettings, folder: str) -> DraftHead:
    method = TRAINABLE[settings.method].name
    if (found := method_of(folder)) != method:
        raise InvalidRequest(f"start_from {folder} holds a {found}, not a {method}", param="start_from")
    return read_head(folder, settings.target, method=method, dtype=torch.float32)


def _create_eagle(settings: TrainSettings, target: PreTrainedModel, counts: Tensor) -> EagleHead:
    config = target.config.get_text_config()
    # Without a bias of fc, which vLLM does not know.
    shape = EagleConfig(layer=_layer(settings, config, config.hidden_size), vocab_size=config.vocab_size, bias=False)
    return EagleHead(shape, embeddings=_embeddings(target), lm_head=_lm_head(target))


def _create_medusa(settings: TrainSettings, target: PreTrainedModel, counts: Tensor) -> MedusaHeads:
    config = target.config.get_text_config()
    heads = MedusaHeads(
        MedusaConfig(
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            num_heads=settings.num_predict or NUM_PREDICT,
            num_layers=settings.num_layers or 1,
        )
    )
    for name, parameter in heads.named_parameters():
        # A head starts as the target's own next token: Cai et al. 2024, section 2.1.1.
        parameter.data.copy_(torch.zeros(()) if "linear" in name else _lm_head(target))
    return heads


def _create_mlp(settings: TrainSettings, target: PreTrainedModel, counts: Tensor) -> MlpSpeculator:
    config = target.config.get_text_config()
    inner = settings.inner_dim or config.hidden_size
    speculator = MlpSpeculator(
        MlpSpeculatorConfig(
            emb_dim=config.hidden_size,
            inner_dim=inner,
            vocab_size=config.vocab_size,
            n_predict=settings.num_predict or NUM_PREDICT,
            scale_input=True,
            tie_weights=settings.tie_weights,
        )
    )
    for name, parameter in speculator.named_parameters():
        if name.startswith(("emb.", "head.")):
            whole = _embeddings(target) if name.startswith("emb.") else _lm_head(target)
            parameter.data.copy_(narrowed(whole, inner))
    return speculator


def _create_draft(settings: TrainSettings, target: PreTrainedModel, counts: Tensor) -> LlamaForCausalLM:
    return LlamaForCausalLM(_draft_config(settings, target.config.get_text_config()))


def _create_eagle3(settings: TrainSettings, target: PreTrainedModel, counts: Tensor) -> Eagle3Head:
    config = target.config.get_text_config()
    size = settings.hidden_size or config.hidden_size
    draft_vocab_size = min(settings.draft_vocab_size or MAX_DRAFT_VOCAB_SIZE, config.vocab_size)
    narrow = size != config.hidden_size
    shape = Eagle3Config(
        layer=_layer(settings, config, size),
        target_hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        draft_vocab_size=draft_vocab_size,
        hidden_state_layers=layers_read(settings, target),
        owns_embeddings=narrow,
    )
    head = Eagle3Head(shape, embeddings=None if narrow else _embeddings(target))
    token_ids = most_frequent(counts, draft_vocab_size)
    head.set_vocabulary(token_ids)
    head.lm_head.weight.data.copy_(narrowed(_lm_head(target)[token_ids], size))
    if narrow:
        head.embed_tokens.weight.data.copy_(narrowed(_embeddings(target), size))
    return head


def _create_block(settings: TrainSettings, target: PreTrainedModel, counts: Tensor) -> DFlashHead:
    config = target.config.get_text_config()
    size = settings.hidden_size or config.hidden_size
    draft_vocab_size = min(settings.draft_vocab_size or config.vocab_size, config.vocab_size)
    narrow = size != config.hidden_size
    shape: dict[str, Any] = {
        "layer": replace(_layer(settings, config, size), qk_norm=True),
        "reaches": (Reach(),) * (settings.num_layers or 2),
        "target_hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": draft_vocab_size,
        "hidden_state_layers": layers_read(settings, target),
        "block_size": settings.block_size or BLOCK_SIZE,
        "mask_token_id": int(counts.argmin()),  # a token that the target hardly writes
        "owns_embeddings": narrow,
        "owns_lm_head": narrow or draft_vocab_size < config.vocab_size,
        "owns_mask": not narrow,
    }
    if settings.method == "dspark":
        kind: type[DFlashHead] = DSparkHead
        made: DFlashConfig = DSparkConfig(
            **shape,
            predicts_next=True,
            markov_rank=settings.markov_rank or MARKOV_RANK,
            markov_type=settings.markov_type or MARKOV_TYPES[0],
            has_confidence=True,
            confidence_reads_token=True,
        )
    else:
        kind, made = DFlashHead, DFlashConfig(**shape)
    embeddings, lm_head = _embeddings(target), _lm_head(target)
    head = kind(made, embeddings=embeddings, lm_head=lm_head)
    token_ids = most_frequent(counts, draft_vocab_size)
    head.set_vocabulary(token_ids)
    if made.owns_lm_head:
        head.lm_head.weight.data.copy_(narrowed(lm_head[token_ids], size))
    if narrow:
        head.embed_tokens.weight.data.copy_(narrowed(embeddings, size))
    if isinstance(head, DSparkHead):
        for table in (head.markov_head.markov_w1, head.markov_head.markov_w2):
            nn.init.normal_(table.weight, std=0.02)
    return head


def _layer(settings: TrainSettings, config: Any, size: int) -> LayerConfig:
    head_dim = (
        settings.head_dim or getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    num_heads = settings.num_heads or max(1, size // head_dim)
    most = min(num_heads, getattr(config, "num_key_value_heads", num_heads))
    num_kv_heads = settings.num_kv_heads or max(n for n in range(1, most + 1) if num_heads % n == 0)
    if num_heads % num_kv_heads:
        raise InvalidRequest(f"{num_heads} heads cannot share {num_kv_heads} key-value heads", param="num_kv_heads")
    rope = getattr(config, "rope_parameters", None) or {}
    return LayerConfig(
        hidden_size=size,
        intermediate_size=settings.intermediate_size or config.intermediate_size * size // config.hidden_size,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=getattr(config, "rms_norm_eps", 1e-6),
        rope=RopeConfig(
            theta=float(rope.get("rope_theta", 10_000.0)), max_position_embeddings=config.max_position_embeddings
        ),
    )


def _draft_config(settings: TrainSettings, config: Any) -> LlamaConfig:
    size = settings.hidden_size or 128
    num_heads = settings.num_heads or max(1, size // (settings.head_dim or 32))
    return LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=size,
        num_hidden_layers=settings.num_layers or 2,
        num_attention_heads=num_heads,
        num_key_value_heads=settings.num_kv_heads or max(1, num_heads // 2),
        head_dim=settings.head_dim or size // num_heads,
        intermediate_size=settings.intermediate_size or 3 * size,
        max_position_embeddings=config.max_position_embeddings,
        tie_word_embeddings=True,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
    )


def _embeddings(target: PreTrainedModel) -> Tensor:
    """float32 [V, Ht] on the CPU."""
    weight = cast("Tensor", target.get_input_embeddings().weight)
    return weight.detach().float().cpu()


def _lm_head(target: PreTrainedModel) -> Tensor:
    """float32 [V, Ht] on the CPU."""
    weight = cast("Tensor", target.get_output_embeddings().weight)  # type: ignore[no-untyped-call]
    return weight.detach().float().cpu()


def narrowed(weight: Tensor, size: int) -> Tensor:
    """Rows [N, H] as [N, size]: their coordinates along the main axes, the nearest of that rank."""
    if size >= weight.shape[1]:
        return nn.functional.pad(weight, (0, size - weight.shape[1]))
    axes: Tensor = torch.linalg.eigh(weight.T @ weight).eigenvectors  # of ascending eigenvalues
    return weight @ axes[:, -size:]


@dataclass(frozen=True)
class _Trainer:
    """How a method is trained: a fresh module in the target's shape, and the student on any module of the method."""

    create: Callable[[TrainSettings, PreTrainedModel, Tensor], Module]
    student: Callable[[Any, TrainSettings, int], Student]


#: All methods that can be trained, by their names in `tandem train`.
_TRAINERS: Final[Mapping[str, _Trainer]] = {
    "eagle3": _Trainer(_create_eagle3, _eagle3_student),
    "eagle": _Trainer(_create_eagle, _eagle_student),
    "mtp": _Trainer(lambda settings, target, counts: create_mtp(target), _mtp_student),
    "dflash": _Trainer(_create_block, _block_student),
    "dspark": _Trainer(_create_block, _block_student),
    "medusa": _Trainer(_create_medusa, _medusa_student),
    "mlp": _Trainer(_create_mlp, _mlp_student),
    "draft": _Trainer(_create_draft, _draft_student),
}
