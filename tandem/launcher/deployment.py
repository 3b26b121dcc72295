"""One machine's target, draft and gateway: their settings, and the processes that run with them.

The target gets a thread per core, the draft one thread. They do not work at the same time: the target waits while the
draft drafts, and the draft waits while the target verifies. Waiting threads must sleep, not spin: see
:mod:`tandem.launcher.environment`.
"""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from specdec.flags import flags_of, parsed_options, settings_from
from specdec.methods import LOOKUP_METHODS, METHODS, MODEL_METHODS, STATES_FILE
from specdec.process.ports import check_port
from specdec.settings import (
    API_KEY_VARIABLE,
    DraftSettings,
    GatewaySettings,
    LookupSettings,
    ModelSettings,
    RequestLimits,
    SchedulerSettings,
    SpeculativeSettings,
    TargetSettings,
)
from specdec.settings.option import options_of
from tandem.launcher.environment import tuned_environment
from tandem.launcher.supervisor import ServiceSpec
from tandem.speculative_config import OLDER_NAMES, ModelChoice, choose_models, read_speculation

_DRAFT_THREADS: Final = 1
#: Options of the target's model that its draft has not.
_TARGET_OPTIONS: Final = ("model", "tensor_parallel_size", "tensor_parallel_timeout_s")
#: Share of a GPU's memory the draft gets where it lives on the target's GPU.
_DRAFT_GPU_SHARE: Final = 0.15
#: Options of the gateway that follow from the rest of a deployment, or from its services running on one machine.
DERIVED_OPTIONS: Final = (
    *(
        "targets",
        "drafts",
        "lookup",
        "tokenizer",
        "num_speculative_tokens",
        "disable_by_batch_size",
        "untrusted_drafts",
    ),
    *("backend_ssl_certfile", "backend_ssl_keyfile", "backend_ssl_ca_certs", "published_host"),
    *("target_api_key", "target_api_key_file"),
)
#: Options of the gateway that mean something to a server only. All others are those of :class:`tandem.LLM`, too.
SERVER_OPTIONS: Final = (
    *("host", "port", "grpc_port", "served_model_name", "request_timeout_s", "drain_s"),
    *("max_concurrent_sequences", "max_queued_requests", "max_queue_wait_s"),
    *("draft_timeout_s", "max_target_retries", "target_wait_s", "log_level", "log_format", "log_requests"),
    *("otlp_traces_endpoint", "disable_playground", "max_stored_response_bytes"),
    *("ssl_certfile", "ssl_keyfile", "ssl_ca_certs", "insecure"),
    *options_of(RequestLimits),
)


@dataclass(frozen=True, slots=True)
class Deployment:
    """Settings of the services; ``draft`` is None where no service drafts."""

    target: TargetSettings
    draft: DraftSettings | None
    gateway: GatewaySettings

    def describe(self) -> str:
        """The models and how they speculate, in a few words."""
        name = ", ".join(self.gateway.served_model_name)
        drafters = list(self.gateway.lookup)
        if self.draft is not None:
            speculative = self.draft.speculative
            drafters += [
                Path(speculative.model or "").name if each in MODEL_METHODS else each for each in speculative.methods
            ]
        if not drafters:
            return f"{name} (no speculation)"
        return f"{name}, drafted by {' and '.join(drafters)}, k = {self.gateway.num_speculative_tokens}"

    def ready_line(self, addresses: Mapping[str, str]) -> str:
        """The one line that says what is served where; ``addresses`` are those of the services behind the gateway."""
        host, scheme = self.gateway.host, "https" if self.gateway.tls else "http"
        parts = [
            f"ready: {scheme}://{host}:{self.gateway.port}/v1, gRPC {host}:{self.gateway.grpc_port}",
            self.describe(),
            *([", ".join(f"{name} {address}" for name, address in addresses.items())] if addresses else []),
        ]
        return " | ".join(parts)

    def with_ports(self) -> Deployment:
        """The same with a free port for each port that is 0: a restarted gateway must come back where it was.

        Raises:
            InvalidRequest: a port is taken.
        """
        gateway = self.gateway
        check_port(gateway.host, gateway.port)
        check_port(gateway.host, gateway.grpc_port, param="grpc_port")
        port, grpc_port = gateway.port or free_port(gateway.host), gateway.grpc_port or free_port(gateway.host)
        return replace(self, gateway=replace(gateway, port=port, grpc_port=grpc_port))


def deployment_of(args: argparse.Namespace) -> Deployment:
    """The deployment that parsed flags of ``serve`` (or of another command with the same flags) stand for."""
    older = {name: getattr(args, name, None) for name in OLDER_NAMES}
    speculative = read_speculation(args.speculative_config, older, target=args.model)
    choice = choose_models(args.model, speculative, tokenizer=args.tokenizer)
    gateway = {
        name: value for name, value in parsed_options(GatewaySettings, args).items() if name not in DERIVED_OPTIONS
    }
    return make_deployment(
        choice,
        settings_from(ModelSettings, args, model=choice.target),
        scheduler=settings_from(SchedulerSettings, args),
        gateway=gateway,
    )


def _reads_states(draft: ModelSettings | None) -> bool:
    """Whether a draft model can read the target's states (PARD-2)."""
    return draft is not None and Path(draft.model, STATES_FILE).is_file()


def make_deployment(
    choice: ModelChoice,
    model: ModelSettings,
    *,
    scheduler: SchedulerSettings | None = None,
    gateway: Mapping[str, Any] | None = None,
) -> Deployment:
    """Settings of all services for the chosen models; ``model`` is the target, whose options the draft shares."""
    given = dict(gateway or {})
    names = given.pop("served_model_name", None) or (choice.name,)
    rule = given.get("verification")
    scheduler = scheduler or SchedulerSettings()
    draft = draft_model = None
    speculative = choice.speculative
    lookups = tuple(method for method in speculative.methods if method in LOOKUP_METHODS) if choice.speculates else ()
    if choice.speculates and len(lookups) < len(speculative.methods):
        speculative = replace(speculative, method=speculative.methods[len(lookups) :])
        if speculative.needs_model:
            draft_model, model = _share_device(model, speculative)
            draft_model = replace(draft_model, tokenizer=choice.draft_tokenizer)
        draft = DraftSettings(
            speculative=speculative,
            model=draft_model,
            target_model=choice.target if speculative.reads_target or _reads_states(draft_model) else None,
            scheduler=scheduler,
        )
    return Deployment(
        target=TargetSettings(
            model=model,
            scheduler=scheduler,
            hidden_state_maps=tuple(
                draft_model.model for method in speculative.methods if draft_model and METHODS[method].maps_states
            ),
            **({} if rule is None else {"verification": rule}),
        ),
        draft=draft,
        gateway=GatewaySettings(
            served_model_name=names,
            tokenizer=model.tokenizer or model.model,
            lookup=lookups,
            lookup_settings=LookupSettings(**{name: getattr(speculative, name) for name in options_of(LookupSettings)}),
            num_speculative_tokens=speculative.num_speculative_tokens if choice.speculates else 0,
            disable_by_batch_size=speculative.disable_by_batch_size,
            **given,
        ),
    )


def _share_device(model: ModelSettings, speculative: SpeculativeSettings) -> tuple[ModelSettings, ModelSettings]:
    """The draft's settings and the target's, so that both fit the device."""
    assert speculative.model is not None
    draft = replace(
        model,
        model=speculative.model,
        tokenizer=None,
        quantization=speculative.quantization,
        num_threads=_DRAFT_THREADS,
        kv_cache_memory_bytes=None,
        tensor_parallel_size=1,
    )
    if is_on_gpu(model):
        share = model.gpu_memory_utilization
        draft = replace(draft, gpu_memory_utilization=share * _DRAFT_GPU_SHARE)
        model = replace(model, gpu_memory_utilization=share * (1 - _DRAFT_GPU_SHARE))
    return draft, model


def is_on_gpu(model: ModelSettings) -> bool:
    """Whether a model will run on a GPU, as far as can be told without torch."""
    return model.device.startswith("cuda") or (model.device == "auto" and Path("/dev/nvidia0").exists())


def services_of(
    deployment: Deployment, sockets: Path, *, target: str | None = None, draft: str | None = None
) -> list[ServiceSpec]:
    """The processes of a deployment, in the order they start; target and draft listen on sockets in a folder.

    ``target`` and ``draft`` are addresses of services that run already: these are not among them.
    """
    gateway = deployment.gateway
    shared = ["--drain-s", f"{gateway.drain_s:g}", "--log-level", gateway.log_level, "--log-format", gateway.log_format]
    if gateway.otlp_traces_endpoint is not None:
        shared += ["--otlp-traces-endpoint", gateway.otlp_traces_endpoint]
    # Progress bars of the loaders would fill the log.
    environment = {**tuned_environment(os.environ), "TQDM_DISABLE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    target_socket, draft_socket = (f"unix:{sockets}/{name}.sock" for name in ("target", "draft"))
    services = [
        ServiceSpec(
            name="target",
            module="target_service",
            arguments=(*flags_of(deployment.target.model), *flags_of(deployment.target.scheduler),
                       *flags_of(deployment.target), "--socket", target_socket, *shared),
            environment=environment,
            address=target_socket,
        )
    ]  # fmt: skip
    if deployment.draft is not None and draft is None:
        settings = deployment.draft
        model = flags_of(settings.model, skip=_TARGET_OPTIONS) if settings.model else ()
        services.append(
            ServiceSpec(
                name="draft",
                module="draft_service",
                arguments=(
                    *flags_of(settings.speculative),
                    *flags_of(settings),
                    *model, *flags_of(settings.scheduler, skip={"max_wait_s"}), "--socket", draft_socket, *shared),
                environment=environment,
                address=draft_socket,
            )
        )  # fmt: skip
    gateway = replace(
        gateway,
        targets=(target or services[0].address,),
        drafts=(draft,) if draft else tuple(service.address for service in services[1:]),
    )
    services.append(
        ServiceSpec(
            name="gateway",
            module="gateway",
            arguments=(*flags_of(gateway, skip={"api_key"}), *flags_of(gateway.lookup_settings)),
            # Arguments can be read by everybody on the machine.
            environment=environment | ({API_KEY_VARIABLE: ",".join(gateway.api_key)} if gateway.api_key else {}),
            address=f"{gateway.host}:{gateway.port}",
        )
    )
    return services[1:] if target else services


def free_port(host: str = "127.0.0.1") -> int:
    """A port nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port
