"""Settings of `tandem train`."""

from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Final

from specdec.methods import TRAINABLE
from specdec.settings.option import about, check_options, option, options_of, require
from tandem.training.loss_weights import LossWeights

#: Method → what is trained.
METHODS: Final = {name: method.training_summary for name, method in TRAINABLE.items()}
#: Drafters whose layer may have another shape than the target's.
_SHAPED: Final = ("eagle3", "eagle", "draft", "dflash", "dspark")
#: Drafters that read what they made of the step before.
_CHAINED: Final = ("eagle3", "eagle", "mtp")
_BLOCKS: Final = ("dflash", "dspark")
#: Heads that read some of the target's hidden states.
_READERS: Final = ("eagle3", *_BLOCKS)
#: Weights of the parts of the loss, where they are not the usual ones. DSpark: 0.1 times the cross entropy and 0.9
#: times the L1 distance, which is twice the total variation.
_LOSSES: Final = {
    "dflash": LossWeights(divergence=1.0, greedy=0.0, variation=0.0),
    "dspark": LossWeights(divergence=0.0, greedy=0.1, variation=1.8),
}
#: Options that may change when a training is resumed.
_FREE: Final = frozenset(
    {"resume", "device", "num_threads", "max_minutes", "checkpoint_minutes", "eval_steps", "keep_lessons"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """One drafter for one target. Lengths count tokens; sizes of None follow from the target."""

    GROUPS: ClassVar = {
        "drafter": "method",
        "text": "data",
        "shape (what is not given follows from the target)": "hidden_size",
        "lessons": "num_rows",
        "training": "num_steps",
    }

    method: str = field(metadata=about("what is trained", choices=tuple(METHODS)))
    target: str = field(metadata=about("folder of the target"))
    output: str = field(metadata=about("folder to write; it must not exist"))

    data: tuple[str, ...] = option((), "files (.txt, .jsonl, .json) and folders; by default Python's standard library")
    held_out: tuple[str, ...] = option((), "text to measure on; by default a part of the data")
    start_from: str | None = option(None, "a drafter of the same method to train on")

    hidden_size: int | None = option(None, "hidden size", gt=0, only=(*_READERS, "draft"))
    intermediate_size: int | None = option(None, "size of the MLP", gt=0, only=_SHAPED)
    num_heads: int | None = option(None, "attention heads", gt=0, only=_SHAPED)
    num_kv_heads: int | None = option(None, "key-value heads", gt=0, only=_SHAPED)
    head_dim: int | None = option(None, "size of an attention head", gt=0, only=_SHAPED)
    num_layers: int | None = option(
        None, "layers (2), or residual blocks of a head (1)", gt=0, only=("draft", "medusa", *_BLOCKS)
    )
    draft_vocab_size: int | None = option(None, "most frequent tokens that are drafted (32000)", gt=0, only=_READERS)
    layers: tuple[int, ...] | None = option(None, "hidden states it reads; i: the input of layer i", only=_READERS)
    num_predict: int | None = option(None, "heads, or steps of the speculator (4)", gt=0, only=("medusa", "mlp"))
    inner_dim: int | None = option(None, "size of the state", gt=0, only=("mlp",))
    tie_weights: bool = option(False, "all steps share their weights", only=("mlp",))
    parallel: int | None = option(None, "tokens that one pass drafts (PARD); by default one", ge=2, only=("draft",))

    block_size: int | None = option(None, "rows of a block (8)", ge=2, le=63, only=_BLOCKS)
    markov_rank: int | None = option(None, "rank of the bias from token to token (64)", gt=0, only=("dspark",))
    markov_type: str | None = option(
        None, "how the bias is made (vanilla)", choices=("vanilla", "gated", "rnn"), only=("dspark",)
    )

    num_rows: int = option(4096, "rows of text", gt=0)
    row_length: int = option(256, "tokens of a row")
    prompt_length: int = option(64, "tokens of data a row begins with; the target writes the others", gt=0)
    data_share: float = option(0.25, "share of the rows that is data alone", ge=0, le=1)
    sampled_share: float = option(0.5, "share of the written rows that is sampled; the others are greedy", ge=0, le=1)
    temperature: float = option(1.0, "of the sampled rows")
    num_held_out_rows: int = option(64, "rows of held-out text, for measuring", gt=0)

    num_steps: int = option(2000, "optimisation steps", gt=0)
    batch_tokens: int = option(4096, "tokens of a step", gt=0)
    unroll_steps: int | None = option(None, "steps of a chain that are trained (4)", gt=0, only=_CHAINED)
    num_anchors: int | None = option(None, "blocks of a row that are trained in a step (48)", gt=0, only=_BLOCKS)
    step_decay: float = option(0.8, "weight of a step's loss in that of the step before", ge=0, le=1)
    rate: float = option(3e-3, "peak learning rate", gt=0)
    table_rate: float | None = option(None, "that of embeddings and output layers; by default a quarter of it in heads")
    weight_decay: float = option(0.1, "weight decay of matrices")
    warmup_steps: int = option(50, "steps over which the rate rises")
    decay_share: float = option(0.5, "share of the steps over which the rate falls to zero", ge=0, le=1)
    divergence_weight: float | None = option(None, "weight of the divergence from the target (1; dspark 0)", ge=0)
    greedy_weight: float | None = option(
        None, "weight of the cross entropy of the target's choice (0.3; dspark 0.1, dflash 0)", ge=0
    )
    variation_weight: float | None = option(None, "weight of the total variation (0.5; dspark 1.8, dflash 0)", ge=0)
    regression_weight: float | None = option(
        None, "weight of the smooth L1 distance to the target's next hidden state (10)", gt=0, only=("eagle",)
    )
    max_minutes: float = option(0.0, "wall-clock limit of everything; the rate falls sooner then; 0: none")
    num_speculative_tokens: int = option(4, "drafted tokens a round where acceptance is measured", gt=0)
    eval_steps: int = option(100, "steps between measurements on held-out text")
    checkpoint_minutes: float = option(2.0, "minutes between checkpoints")
    seed: int = option(1, "of initial weights, prompts, sampling and order")
    device: str = option("auto", "auto, cpu or cuda:N; a GPU computes in bfloat16")
    num_threads: int | None = option(None, "threads on a CPU; by default all cores")
    resume: bool = option(False, "continue an interrupted training of the same output")
    keep_lessons: bool = option(False, "keep OUTPUT.training, which holds lessons and state, when all is done")

    def __post_init__(self) -> None:
        check_options(self)
        for name, each in options_of(type(self)).items():
            value = getattr(self, name)
            require(
                value is None or value is False or not each.only or self.method in each.only,
                name,
                f"{name} is no option of {self.method}, but of {', '.join(each.only)}",
            )
        least = self.prompt_length + self.num_speculative_tokens + 2
        require(
            self.row_length >= least,
            "row_length",
            f"row_length is {self.row_length}; a prompt of {self.prompt_length} and drafts behind it need {least}",
        )
        require(
            self.batch_tokens >= self.row_length,
            "batch_tokens",
            f"batch_tokens is {self.batch_tokens}, less than one row of {self.row_length} (row_length)",
        )

    @property
    def loss_weights(self) -> LossWeights:
        """The weights that are given, else the method's own."""
        usual = _LOSSES.get(self.method, LossWeights())
        given = self.divergence_weight, self.greedy_weight, self.variation_weight
        own = usual.divergence, usual.greedy, usual.variation
        return LossWeights(*(mine if value is None else value for value, mine in zip(given, own, strict=True)))

    def fixed(self) -> dict[str, Any]:
        """The options a resumed training must share with its beginning."""
        return {name: value for name, value in asdict(self).items() if name not in _FREE}
