"""The modes that are compared, as data: a drafter, a rule, so many drafted tokens a round."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from specdec.errors import InvalidRequest
from specdec.methods import LOOKUP_METHODS, METHODS, MODEL_METHODS
from specdec.rules import Rule
from specdec.settings import SpeculativeSettings
from tandem.checkpoints import bundled_drafter
from tandem.launcher.deployment import Deployment, deployment_of
from tandem.speculative_config import OLDER_NAMES, read_speculation

PLAIN: Final = "plain"
#: After the method of a drafter that is to draft trees; and which: as small a one as says something, for CPUs.
TREE: Final = "-tree"
_TREE: Final = {"num_speculative_tokens": 7, "tree_top_k": 2, "tree_depth": 4}
#: What ``--drafter all`` stands for, where it can be had.
DRAFTERS: Final = (*(method for method in METHODS if method != "none"), f"eagle3{TREE}", "suffix+draft_model")


@dataclass(frozen=True, slots=True)
class BenchMode:
    """One mode of decoding: a drafter or none, a rule and k."""

    name: str
    #: Which of the systems is asked.
    system: str
    #: Drafted tokens a round at most; 0 decodes plainly, None leaves it to the server.
    k: int | None
    rule: Rule | None = None
    #: Whether it drafts trees, of which α and k say little.
    is_tree: bool = False

    @property
    def speculates(self) -> bool:
        """Whether anything is drafted."""
        return self.k != 0


def plain_mode(system: str) -> BenchMode:
    """No drafting at all."""
    return BenchMode(PLAIN, system, 0)


def speculative_modes(
    systems: Mapping[str, int | None], rules: Sequence[Rule | None], trees: Collection[str] = ()
) -> list[BenchMode]:
    """Every system (name → k) under every rule; ``trees`` are those that draft trees."""
    return [
        BenchMode(system if len(rules) == 1 else f"{system}, {rule}", system, k, rule, system in trees)
        for system, k in systems.items()
        for rule in rules
    ]


def rules_of(args: argparse.Namespace) -> list[Rule | None]:
    """The rules ``--rules`` and ``--verification`` name; [None] is the server's default."""
    names = [part.strip() for part in (args.rules or args.verification or "").split(",") if part.strip()]
    if names == ["all"]:
        names = [str(rule) for rule in Rule]
    if unknown := [name for name in names if name not in list(Rule)]:
        raise InvalidRequest(
            f"--rules names {', '.join(unknown)}; choose from {', '.join(Rule)}, or all", param="rules"
        )
    if len(names) > 1 and args.temperature == 0:
        raise InvalidRequest("all rules are the same at temperature 0: give --temperature too", param="rules")
    return [Rule(name) for name in names] or [None]


def deployments_of(args: argparse.Namespace) -> dict[str, Deployment]:
    """A deployment for each drafter that is asked for, by its method; they differ in the drafter alone."""
    deployments = {}
    for name, config in _drafters(args).items():
        given = {**vars(args), **dict.fromkeys(OLDER_NAMES), "speculative_config": config}
        deployments[name] = deployment_of(argparse.Namespace(**given))
    return deployments


def _drafters(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Method, with :data:`TREE` after it or two with a plus sign between them → ``speculative_config``, for the
    drafters asked for.
    """
    older = {name: getattr(args, name, None) for name in OLDER_NAMES}
    k = older.pop("num_speculative_tokens") if args.k is None else args.k
    given = read_speculation(args.speculative_config, older, target=args.model)
    known: dict[str, dict[str, Any]] = {method: {"method": method} for method in LOOKUP_METHODS}
    for method in MODEL_METHODS:
        if model := bundled_drafter(args.model, [method]):
            known[method] = {"method": method, "model": model}
    for method, folder in (part.strip().partition("=")[::2] for part in (args.drafter or "").split(",") if "=" in part):
        if method not in MODEL_METHODS:
            raise InvalidRequest(
                f"--drafter {method}={folder}: only {', '.join(MODEL_METHODS)} have a folder; give that of a tree or"
                f" pair by its method, as eagle3={folder},eagle3{TREE}",
                param="drafter",
            )
        known[method] = {"method": method, "model": folder}
    if given is not None:
        known[given.methods[-1]] = {**asdict(given), "method": given.methods[-1]}
        k = given.num_speculative_tokens if k is None else k
    known |= {
        f"{lookup}+{other}": {**config, "method": [lookup, other]}
        for lookup in LOOKUP_METHODS
        for other, config in known.items()
        if lookup != other
    }
    known |= {f"{method}{TREE}": known[method] for method in MODEL_METHODS if method in known}
    k = SpeculativeSettings().num_speculative_tokens if k is None else k
    if k < 1:
        raise InvalidRequest(f"k is {k}; it must be at least 1 where drafting is measured", param="k")
    drafters = {}
    for name in _names(args, given, known):
        if name not in known:
            raise InvalidRequest(
                f'--drafter {name} needs a model: {name}=FOLDER, or --speculative-config \'{{"model": "…"}}\'',
                param="drafter",
            )
        tree = _TREE if name.endswith(TREE) else {}
        drafters[name] = {**known[name], "num_speculative_tokens": k, **tree}
    return drafters


def _names(args: argparse.Namespace, given: SpeculativeSettings | None, known: Collection[str]) -> list[str]:
    chosen = [part.strip().partition("=")[0] for part in (args.drafter or "").split(",") if part.strip()]
    if chosen == ["all"]:
        return [name for name in DRAFTERS if name in known]
    if not chosen and given is not None:
        chosen = ["+".join(given.methods)]
    elif not chosen and args.model is None:
        chosen = ["draft_model"]
    if not chosen or chosen == ["none"]:
        raise InvalidRequest("there is nothing to compare: give --speculative-config or --drafter", param="drafter")
    if unknown := [name for name in chosen if not set(name.removesuffix(TREE).split("+")) <= set(METHODS)]:
        raise InvalidRequest(
            f"--drafter names {', '.join(unknown)}; choose from {', '.join(DRAFTERS)}, or all", param="drafter"
        )
    return list(dict.fromkeys(chosen))
