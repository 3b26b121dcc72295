"""From a target and texts to a drafter's folder: lessons, fit, rounding, measurement, files."""

import json
import shutil
import time
from pathlib import Path

import torch
from torch import nn
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedModel

from specdec.errors import InvalidRequest, ModelNotSupported
from specdec.methods import TRAINABLE
from tandem.training.checkpoint import name_window, round_weights, save_draft, save_head
from tandem.training.dataset import load_texts
from tandem.training.draft_vocabulary import count_tokens
from tandem.training.fit import Evaluation, Fit, measure
from tandem.training.lesson import check_states
from tandem.training.lesson_store import LessonStore
from tandem.training.settings import TrainSettings
from tandem.training.student import layers_read, make_student


def train_drafter(settings: TrainSettings) -> list[Evaluation]:
    """Trains a drafter and writes `settings.output`; returns what was measured, last of all the rounded weights.

    All of the work lies in a folder beside the output until that is written; there a resumed training finds it.

    Raises:
        InvalidRequest: the output exists, data is missing or too short, or a resumed training is another one.
        ModelNotSupported: the target cannot be loaded, or is none that heads can be trained for.
    """
    started_s = time.monotonic()
    output = Path(settings.output)
    work = work_folder(settings)
    if output.exists():
        raise InvalidRequest(f"output {output} exists already; name another folder, or remove it", param="output")
    device = _device(settings.device)
    if settings.num_threads:
        torch.set_num_threads(settings.num_threads)
    target = load_target(settings.target, device)
    tokenizer = AutoTokenizer.from_pretrained(settings.target)
    layers = layers_read(settings, target)
    check_states(target, layers)
    texts = load_texts(tokenizer, settings.data, settings.held_out)
    _claim(work, settings)

    begin = [tokenizer.bos_token_id]
    store = LessonStore(work / "lessons", settings, layers, begin if tokenizer("").input_ids == begin else ())
    with tqdm(total=settings.num_rows, desc="lessons", unit="row", dynamic_ncols=True) as bar:
        store.fill(target, texts.training, texts.held_out, bar.update)
    parts, held_out = store.parts(), store.held_out()

    counts = count_tokens((part.rows for part in parts), target.config.get_text_config().vocab_size)
    student = make_student(settings, target, counts, len(tokenizer))
    end_id = tokenizer.eos_token_id
    del target
    minutes = settings.max_minutes and max(0.1, settings.max_minutes - (time.monotonic() - started_s) / 60)
    fit = Fit(student, settings, work / "state.pt", minutes)
    fit.run(parts, held_out, end_id)

    round_weights(student.module)
    rounded = measure(student, held_out, settings, end_id, fit.schedule.step)
    if isinstance(student.module, LlamaForCausalLM):
        save_draft(student.module, Path(settings.target), output)
    else:
        save_head(student.module, output)
    if TRAINABLE[settings.method].attends:  # it reads all tokens before, and has learnt from no longer texts
        name_window(output, settings.row_length)
    if not settings.keep_lessons:
        shutil.rmtree(work)
    return [*fit.history, rounded]


def work_folder(settings: TrainSettings) -> Path:
    """Where a training keeps its lessons and its state until it is done."""
    output = Path(settings.output)
    return output.with_name(f"{output.name}.training")


def load_target(folder: str, device: torch.device) -> PreTrainedModel:
    """The target for reading and writing text, in bfloat16.

    Raises:
        ModelNotSupported: transformers knows no causal language model of this kind, or the files are damaged.
    """
    try:
        target: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelNotSupported(f"target {folder} cannot be loaded as a causal language model: {reason}") from None
    nn.Module.to(target, device).requires_grad_(False)
    nn.Module.train(target, False)
    return target


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InvalidRequest(f"device is {name!r}; choose auto, cpu or cuda:N", param="device") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InvalidRequest(f"device is {name!r}, and there is no GPU here", param="device")
    return device


def _claim(work: Path, settings: TrainSettings) -> None:
    """Makes the work folder, or makes sure that it is this training's."""
    path = work / "settings.json"
    fixed = json.loads(json.dumps(settings.fixed()))
    if not path.exists():
        if settings.resume:
            raise InvalidRequest(f"there is nothing to resume: {work} does not exist", param="resume")
        work.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(fixed, indent=2) + "\n", encoding="utf-8")
        return
    if not settings.resume:
        raise InvalidRequest(
            f"{work} holds a training that was interrupted; resume it, or remove the folder", param="output"
        )
    begun = json.loads(path.read_text(encoding="utf-8"))
    for name, value in fixed.items():
        if begun.get(name) != value:
            raise InvalidRequest(
                f"{name} is {value!r}, but the interrupted training in {work} had {begun.get(name)!r}", param=name
            )
