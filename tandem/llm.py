"""The offline API: :class:`LLM`, with vLLM's arguments and results."""

from __future__ import annotations

import asyncio
import logging
import time
import warnings
import weakref
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from os import PathLike, fspath
from types import TracebackType
from typing import Any, Final, NoReturn, Self

from gateway.acceptance_check import StartUpCheck
from gateway.requests.conversation import Conversation, read_conversation
from gateway.requests.types import GenerationChunk, GenerationRequest
from gateway.text.chat_template import read_template
from specdec.errors import InvalidRequest, did_you_mean, quote
from specdec.params import SamplingParams
from specdec.settings import GatewaySettings, ModelSettings, SchedulerSettings
from specdec.settings.option import options_of
from tandem.checkpoints import find_checkpoint
from tandem.launcher.deployment import DERIVED_OPTIONS, SERVER_OPTIONS, Deployment, make_deployment
from tandem.launcher.effects import without_effect
from tandem.launcher.embedded import Embedded
from tandem.launcher.loop_thread import BackgroundLoop, at_exit
from tandem.outputs import RequestOutput, make_output
from tandem.sampling_params import OfflineParams
from tandem.speculative_config import OLDER_NAMES, choose_models, read_speculation
from tandem.vllm_calls import REFUSED_METHODS, check_further, check_prompt
from tandem.vllm_options import VLLM_OPTIONS, as_argument, notes_on

logger = logging.getLogger(__name__)

Prompt = str | Sequence[int] | Mapping[str, Any]
Messages = Sequence[Mapping[str, Any]]

#: The class of each argument that is an option of a service.
OPTIONS: Final[Mapping[str, type]] = {
    name: settings
    for settings in (ModelSettings, SchedulerSettings, GatewaySettings)
    for name in options_of(settings)
    if name not in {"model", *DERIVED_OPTIONS, *SERVER_OPTIONS} or (name, settings) == ("tokenizer", ModelSettings)
}
#: Offline, all prompts are there at once: a session waits until a place is free.
_PATIENCE_S: Final = 1e6


class LLM:
    """A target model, with a drafter or without, in this process.

    Args:
        model: Folder, hub name or bundled name of the target. None loads the bundled pair.
        speculative_config: vLLM's object, such as ``{"model": …, "num_speculative_tokens": 5}`` or
            ``{"method": "ngram", "prompt_lookup_max": 4, "num_speculative_tokens": 5}``.
        options: Those of :data:`OPTIONS` (``dtype``, ``max_model_len``, ``verification``, ``seed``, …) and vLLM's older
            ``speculative_model``, ``num_speculative_tokens``, ``ngram_prompt_lookup_max``, …. Others of vLLM that
            change no text are accepted with a warning.

    Raises:
        InvalidRequest: an argument is unknown, out of range, or names a checkpoint that does not exist.
        ModelNotSupported: a checkpoint cannot be run correctly, or the draft's vocabulary is not the target's.
    """

    def __init__(
        self,
        model: str | PathLike[str] | None = None,
        *,
        speculative_config: Mapping[str, Any] | str | None = None,
        **options: Any,
    ) -> None:
        deployment = _deployment(None if model is None else fspath(model), speculative_config, options)
        for name, why in without_effect(deployment):
            if name in options:
                logger.warning("%s: no effect here: %s", name, why)
        self._load(deployment)

    @classmethod
    def of(cls, deployment: Deployment) -> Self:
        """The same from settings."""
        made = cls.__new__(cls)
        made._load(deployment)
        return made

    def _load(self, deployment: Deployment) -> None:
        self.deployment = deployment
        self._loop = BackgroundLoop("tandem-llm")
        try:
            self._embedded = self._loop.run(Embedded.start(self.deployment))
            self._loop.run(StartUpCheck(self._embedded.generation).run())
        except BaseException:
            self._loop.close()
            raise
        self._close = weakref.finalize(self, _close, self._loop, self._embedded)
        at_exit(self._close)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        predictions: Sequence[str] = (),
        **further: Any,
    ) -> list[RequestOutput]:
        """Continue each prompt; the results stand in the order of the prompts.

        A prompt is a text, token ids, ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``; an object may have a
        ``cache_salt``, which separates it from prompts that begin alike. ``sampling_params`` is
        one for all or one per prompt. ``predictions`` say what each text is expected to be, such as the file that is
        to be edited: they are drafted. ``use_tqdm`` may be a function that makes the bar. ``further`` are arguments of
        vLLM that may ask for nothing, such as ``lora_request=None``. The first error ends the call and is raised.
        """
        check_further(further)
        listed = _list_prompts(prompt_token_ids if prompts is None else prompts)
        params = _list_params(sampling_params, len(listed))
        expected = _list_predictions(predictions, len(listed))
        requests = [
            GenerationRequest(prompt=prompt, cache_salt=salt, params=param, prediction=prediction)
            for (prompt, salt), param, prediction in zip(listed, params, expected, strict=True)
        ]
        return self._run(requests, use_tqdm=use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool | None = None,
        predictions: Sequence[str] = (),
        **further: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several; each is a list of ``{"role": …, "content": …}``. ``tools``,
        ``tool_choice`` and ``parallel_tool_calls`` are OpenAI's, the rest as in :meth:`generate`.
        """
        check_further(further)
        is_one = isinstance(messages, str) or (len(messages) > 0 and isinstance(messages[0], Mapping))
        conversations = [messages] if is_one else list(messages)
        params = _list_params(sampling_params, len(conversations))
        expected = _list_predictions(predictions, len(conversations))
        requests = [
            self._chat_request(
                Conversation(
                    messages=_read_messages(conversation),
                    tools=tools or (),
                    tool_choice=tool_choice,
                    parallel_tool_calls=parallel_tool_calls,
                    streams=False,
                    add_generation_prompt=add_generation_prompt,
                    variables=chat_template_kwargs or {},
                    structured_outputs=param.structured_outputs,
                ),
                param,
                prediction,
            )
            for conversation, param, prediction in zip(conversations, params, expected, strict=True)
        ]
        return self._run(requests, use_tqdm=use_tqdm)

    def _chat_request(
        self, conversation: Conversation, params: SamplingParams, prediction: str = ""
    ) -> GenerationRequest:
        generation = self._embedded.generation
        prompt, reply = read_conversation(generation.text, conversation, generation.router.model())
        # The template wrote the special tokens already.
        return GenerationRequest(
            prompt=prompt,
            params=reply.constrain(params),
            prediction=prediction,
            add_special_tokens=False,
            reply=reply,
        )

    def get_tokenizer(self) -> Any:
        """The tokenizer, as transformers loads it, with the chat template of this object."""
        from transformers import AutoTokenizer  # noqa: PLC0415 (not needed to generate)

        settings = self.deployment.target.model
        folder = self.deployment.gateway.tokenizer or settings.model
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=settings.trust_remote_code)
        if self.deployment.gateway.chat_template is not None:
            tokenizer.chat_template = read_template(self.deployment.gateway.chat_template)
        return tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Those of calls that give none."""
        return OfflineParams()

    def __getattr__(self, name: str) -> NoReturn:
        reason = REFUSED_METHODS.get(name)
        raise AttributeError(f"LLM has no {name}" + (f": {reason}" if reason else ""), name=name, obj=self)

    def close(self) -> None:
        """Drop the models and end the thread. Idempotent; using the object afterwards is an error."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[GenerationChunk]:
        """The pieces of one answer as they come; each sample's last one has ``final``."""
        given, salt = _read_prompt(prompt)
        request = GenerationRequest(prompt=given, cache_salt=salt, params=sampling_params or SamplingParams())
        return self._iterate(request)

    def stream_chat(
        self, messages: Messages, sampling_params: SamplingParams | None = None
    ) -> Iterator[GenerationChunk]:
        """The same for the answer to a conversation, which each piece has as ``message``, too."""
        params = sampling_params or SamplingParams()
        conversation = Conversation(messages=_read_messages(messages), structured_outputs=params.structured_outputs)
        return self._iterate(self._chat_request(conversation, params))

    def _iterate(self, request: GenerationRequest) -> Iterator[GenerationChunk]:
        chunks = self._embedded.generation.stream(request)
        try:
            while True:
                self._check_open()
                if (chunk := self._loop.run(_next(chunks))) is None:
                    return
                yield chunk
        finally:
            if self._close.alive:  # else it has ended with all the others
                self._loop.run(chunks.aclose())

    def _check_open(self) -> None:
        if not self._close.alive:
            raise InvalidRequest("this LLM is closed; make a new one")

    def _run(
        self, requests: Sequence[GenerationRequest], *, use_tqdm: bool | Callable[..., Any]
    ) -> list[RequestOutput]:
        self._check_open()
        most_samples = max((request.params.n for request in requests), default=1)
        places = asyncio.Semaphore(max(1, self.deployment.target.scheduler.max_num_seqs // most_samples))
        with _progress(len(requests), use_tqdm) as advance:
            return self._loop.run(self._generate_all(requests, places, advance))

    async def _generate_all(
        self,
        requests: Sequence[GenerationRequest],
        places: asyncio.Semaphore,
        advance: Callable[[RequestOutput], None],
    ) -> list[RequestOutput]:
        async def generate(request: GenerationRequest) -> RequestOutput:
            async with places:
                output = await self._generate_one(request)
            advance(output)
            return output

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(generate(request)) for request in requests]
        except BaseExceptionGroup as errors:
            raise _first_of(errors) from None
        return [task.result() for task in tasks]

    async def _generate_one(self, request: GenerationRequest) -> RequestOutput:
        arrived = time.time()
        result = await self._embedded.generation.generate(request)
        return make_output(
            result,
            request.prompt if isinstance(request.prompt, str) else None,
            self._embedded.generation.tokenizer,
            times=(arrived, result.first_chunk_s, time.time()),
            with_logprobs=request.params.logprobs is not None,
        )


async def _next(chunks: AsyncGenerator[GenerationChunk, None]) -> GenerationChunk | None:
    return await anext(chunks, None)


def _close(loop: BackgroundLoop, embedded: Embedded) -> None:
    if loop.is_here:
        loop.run(embedded.close())
        loop.close()


def _list_predictions(given: Sequence[str], count: int) -> Sequence[str]:
    if isinstance(given, str) or len(given) not in (0, count):
        raise InvalidRequest(f"predictions must be a list with a text for each of {count} prompts", param="predictions")
    return given or [""] * count


def _deployment(
    model: str | None, speculative_config: Mapping[str, Any] | str | None, options: dict[str, Any]
) -> Deployment:
    """Settings from the arguments of :class:`LLM`."""
    older = {name: options.pop(name) for name in OLDER_NAMES if name in options}
    given: dict[type, dict[str, Any]] = {GatewaySettings: {}, SchedulerSettings: {}, ModelSettings: {}}
    further = {}
    for name, value in options.items():
        if name in OPTIONS:
            given[OPTIONS[name]][name] = fspath(value) if isinstance(value, PathLike) else value
        elif name in VLLM_OPTIONS:
            further[name] = value
        else:
            raise InvalidRequest(f"LLM has no argument {name!r}{_suggest(name)}", param=name)
    for is_ignored, note in notes_on(further, as_argument):
        if is_ignored:
            warnings.warn(note, stacklevel=3)
    tokenizer = given[ModelSettings].get("tokenizer")
    if tokenizer is not None:
        given[ModelSettings]["tokenizer"] = tokenizer = find_checkpoint(tokenizer)
    speculative = read_speculation(speculative_config, older, target=model)
    choice = choose_models(model, speculative, tokenizer=tokenizer)
    return make_deployment(
        choice,
        ModelSettings(model=choice.target, **given[ModelSettings]),
        scheduler=SchedulerSettings(**{"max_wait_s": _PATIENCE_S, "max_waiting": 2**31, **given[SchedulerSettings]}),
        gateway={"draft_timeout_s": _PATIENCE_S, "request_timeout_s": None, **given[GatewaySettings]},
    )


def _suggest(name: str) -> str:
    known = {*OPTIONS, *OLDER_NAMES, "speculative_config"}
    return "; " + did_you_mean(name, known, f"it knows {', '.join(sorted(known))}")


def _list_prompts(prompts: Any) -> list[tuple[str | Sequence[int], str]]:
    """One prompt or many, in any of vLLM's forms, as texts or token ids, each with its salt."""
    if prompts is None:
        raise InvalidRequest("no prompts are given", param="prompts")
    if not hasattr(prompts, "__len__"):
        raise InvalidRequest(f"prompts is {quote(prompts)}; give a prompt or a list of them", param="prompts")
    one = isinstance(prompts, str | Mapping) or (len(prompts) > 0 and isinstance(prompts[0], int))
    return [_read_prompt(prompt) for prompt in ([prompts] if one else prompts)]


def _read_prompt(prompt: Any) -> tuple[str | Sequence[int], str]:
    if isinstance(prompt, Mapping):
        if not {"prompt", "prompt_token_ids"} & prompt.keys():
            raise InvalidRequest(f'a prompt has "prompt" or "prompt_token_ids", not {", ".join(map(repr, prompt))}')
        check_prompt(prompt)
        given = list(prompt["prompt_token_ids"]) if "prompt_token_ids" in prompt else str(prompt["prompt"])
        return given, str(prompt.get("cache_salt") or "")
    if isinstance(prompt, str):
        return prompt, ""
    if isinstance(prompt, Sequence):
        return list(prompt), ""
    raise InvalidRequest(f"a prompt is text, token ids or an object, not {type(prompt).__name__}", param="prompts")


def _read_messages(messages: Any) -> list[Mapping[str, Any]]:
    """A conversation whose contents are texts. Raises :class:`InvalidRequest` for other forms."""
    from gateway.rest.message_schemas import read_content  # noqa: PLC0415 (pydantic)

    is_list = isinstance(messages, Sequence) and not isinstance(messages, str)
    if not is_list or not all(isinstance(each, Mapping) and "role" in each for each in messages):
        raise InvalidRequest(
            f'messages holds {quote(messages)}; a conversation is a list of {{"role": …, "content": …}}',
            param="messages",
        )
    return [{**message, "content": read_content(message.get("content"))} for message in messages]


def _list_params(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or OfflineParams()] * count
    if not isinstance(params, Sequence) or not all(isinstance(each, SamplingParams) for each in params):
        raise InvalidRequest(
            f"sampling_params is {quote(params)}; give SamplingParams, or a list of them", param="sampling_params"
        )
    if len(params) != count:
        raise InvalidRequest(f"{count} prompts came with {len(params)} sampling_params", param="sampling_params")
    return list(params)


def _first_of(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _progress(count: int, bar: bool | Callable[..., Any]) -> AbstractContextManager[Callable[[RequestOutput], None]]:
    """A progress bar over the prompts, with tokens a second behind it."""
    if not bar:
        return nullcontext(lambda _: None)
    from tandem.progress import PromptProgress  # noqa: PLC0415 (tqdm)

    return PromptProgress(count) if bar is True else PromptProgress(count, bar)
