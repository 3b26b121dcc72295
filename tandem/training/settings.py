"""Settings of `tandem train`: frozen, checked once, each default written here and nowhere else."""

from dataclasses import asdict, dataclass
from typing import Any, Final

from specdec.errors import InvalidRequest

METHODS: Final = ("eagle3", "eagle", "medusa", "mlp", "draft")
#: Options that only some methods have.
METHODS_OF: Final = {
    "hidden_size": ("eagle3", "draft"),
    "intermediate_size": ("eagle3", "eagle", "draft"),
    "num_heads": ("eagle3", "eagle", "draft"),
    "num_kv_heads": ("eagle3", "eagle", "draft"),
    "head_dim": ("eagle3", "eagle", "draft"),
    "num_layers": ("draft", "medusa"),
    "draft_vocab_size": ("eagle3",),
    "layers": ("eagle3",),
    "num_predict": ("medusa", "mlp"),
    "inner_dim": ("mlp",),
    "tie_weights": ("mlp",),
    "unroll_steps": ("eagle3", "eagle"),
    "regression_weight": ("eagle",),
}
#: Options that may change when a training is resumed.
_FREE: Final = frozenset(
    {"resume", "device", "num_threads", "max_minutes", "checkpoint_minutes", "eval_steps", "keep_lessons"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """One drafter for one target. Lengths count tokens; sizes of None follow from the target."""

    #: One of :data:`METHODS`.
    method: str
    #: Folder of the target.
    target: str
    #: Folder to write; must not exist.
    output: str
    #: Files and folders with text; none: the standard library, which the bundled target was trained on.
    data: tuple[str, ...] = ()
    #: Text that is only measured on; none: a part of the data.
    held_out: tuple[str, ...] = ()
    #: A drafter of the same method to train on.
    start_from: str | None = None

    hidden_size: int | None = None
    intermediate_size: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    #: Layers of a small model; residual blocks of a Medusa head.
    num_layers: int | None = None
    #: Tokens EAGLE-3 can draft; 32000 at most where not given.
    draft_vocab_size: int | None = None
    #: The target's hidden states EAGLE-3 reads, numbered as transformers numbers them.
    layers: tuple[int, ...] | None = None
    #: Medusa's heads, or the steps of an MLP speculator.
    num_predict: int | None = None
    inner_dim: int | None = None
    tie_weights: bool = False

    #: Rows of text the target writes, and of data it only reads.
    num_rows: int = 4096
    row_length: int = 256
    #: Tokens of data that a row begins with.
    prompt_length: int = 64
    #: Share of the rows that is data alone.
    data_share: float = 0.25
    #: Of the half of the written rows that is not greedy.
    temperature: float = 1.0
    num_held_out_rows: int = 64

    num_steps: int = 2000
    batch_tokens: int = 4096
    #: Steps of EAGLE that are trained, each on the features of the one before.
    unroll_steps: int | None = None
    #: What a step's loss weighs, in that of the step before.
    step_decay: float = 0.8
    #: Peak learning rate.
    rate: float = 3e-3
    #: That of embeddings and output layers; None: a quarter of it in heads, where both start as the target's.
    table_rate: float | None = None
    weight_decay: float = 0.1
    warmup_steps: int = 50
    #: Share of the steps over which the rate falls to zero.
    decay_share: float = 0.5
    greedy_weight: float = 0.3
    variation_weight: float = 0.5
    #: Weight of EAGLE-1's smooth L1 distance to the target's next state.
    regression_weight: float | None = None
    #: Wall-clock limit of everything together; 0 is none.
    max_minutes: float = 0.0
    #: Drafted tokens a round in measurements of acceptance.
    num_speculative_tokens: int = 4
    eval_steps: int = 100
    checkpoint_minutes: float = 2.0

    seed: int = 1
    #: "auto", "cpu" or "cuda:N".
    device: str = "auto"
    num_threads: int | None = None
    #: Go on where an interrupted training of the same output stopped.
    resume: bool = False
    #: Keep the work folder when all is done.
    keep_lessons: bool = False

    def __post_init__(self) -> None:
        _require(self.method in METHODS, "method", f"method is {self.method!r}; choose one of {', '.join(METHODS)}")
        for name, methods in METHODS_OF.items():
            value = getattr(self, name)
            given = value is not None and value is not False
            _require(
                not given or self.method in methods,
                name,
                f"{name} is no option of {self.method}, but of {', '.join(methods)}",
            )
            if given and not isinstance(value, (bool, tuple)):
                _require(value > 0, name, f"{name} is {value}; it must be above 0")
        for name in ("num_rows", "num_held_out_rows", "num_steps", "batch_tokens", "rate", "num_speculative_tokens"):
            _require(getattr(self, name) > 0, name, f"{name} is {getattr(self, name)}; it must be above 0")
        for name in ("data_share", "decay_share", "step_decay"):
            value = getattr(self, name)
            _require(0.0 <= value <= 1.0, name, f"{name} is {value}, outside [0, 1]")
        _require(self.prompt_length > 0, "prompt_length", f"prompt_length is {self.prompt_length}; it must be above 0")
        least = self.prompt_length + self.num_speculative_tokens + 2
        _require(
            self.row_length >= least,
            "row_length",
            f"row_length is {self.row_length}; a prompt of {self.prompt_length} and drafts behind it need {least}",
        )
        _require(
            self.batch_tokens >= self.row_length,
            "batch_tokens",
            f"batch_tokens is {self.batch_tokens}, less than one row of {self.row_length} (row_length)",
        )

    def fixed(self) -> dict[str, Any]:
        """The options a resumed training must share with its beginning."""
        return {name: value for name, value in asdict(self).items() if name not in _FREE}


def _require(condition: bool, param: str, message: str) -> None:
    if not condition:
        raise InvalidRequest(message, param=param)
