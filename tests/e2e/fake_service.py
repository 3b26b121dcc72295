"""``python -m tests.e2e.fake_service target|draft``: the toy backends of the gateway's tests as processes, behind the
real servicers and without torch, so that they start in a moment."""

import argparse
import asyncio
import sys

from draft_service.servicer import DraftServicer
from specdec.errors import Unavailable
from specdec.rpc.lifecycle import run
from specdec.scheduling.admission import Admission
from specdec.settings import ServerSettings
from specdec.types import ServerLoad
from specdec.v1.draft_service_pb2_grpc import add_DraftServiceServicer_to_server
from specdec.v1.target_service_pb2_grpc import add_TargetServiceServicer_to_server
from target_service.servicer import TargetServicer
from tests.gateway.fake_draft import FakeDraft, draft_info
from tests.gateway.fakes import FakeTarget, FakeTargetSession, target_info

#: Those of the bundled target, whose tokenizer the gateway loads; the toys write the first 64 tokens alone.
VOCAB, CONTEXT = 4096, 2048


class AdmittedSession(FakeTargetSession):
    async def close(self):
        await super().close()
        self.backend.admission.leave(self.spec.client)


class AdmittingTarget(FakeTarget):
    """A toy target with the real admission."""

    def __init__(self, *, max_open, max_waiting, max_wait_s, **options):
        super().__init__(**options)
        self.is_draining = False
        self.admission = Admission(
            max_open=max_open,
            max_waiting=max_waiting,
            max_wait_s=max_wait_s,
            undo=lambda _: None,
            describe=lambda: f"the target is full: {self.admission.num_open} of {max_open} sessions open",
        )

    async def open(self, spec, on_states=None, on_admitted=None):
        if self.is_draining:
            raise Unavailable("the target is shutting down")
        await self.admission.admit(lambda: True, client=spec.client)
        session = AdmittedSession(self, spec)
        if on_admitted is not None:
            on_admitted(session)
        return session

    async def load(self):
        return ServerLoad(open_sessions=len(self.open_sessions), waiting_sessions=self.admission.num_waiting)


class FakeService:
    """See :class:`specdec.rpc.lifecycle.Service`."""

    def __init__(self, name, backend, servicer, add):
        self.name = name
        self._backend, self._servicer, self._add = backend, servicer, add

    def register(self, server):
        self._add(self._servicer, server)

    async def start(self):
        pass

    async def wait_failed(self):
        await asyncio.Event().wait()

    async def drain(self):
        self._backend.is_draining = True

    async def stop(self):
        pass


def make_target(args):
    backend = AdmittingTarget(
        max_open=args.max_num_seqs,
        max_waiting=args.max_waiting,
        max_wait_s=args.max_wait_s,
        latency_s=args.latency_s,
        open_latency_s=0.0,
        info=target_info(vocab_size=VOCAB, tokenizer_size=VOCAB, max_model_len=CONTEXT),
    )
    name = "specdec.v1.TargetService"
    return FakeService(
        "target",
        backend,
        TargetServicer(backend),
        lambda servicer, server: server.add(add_TargetServiceServicer_to_server, servicer, name),
    )


def make_draft(args):
    backend = FakeDraft(
        latency_s=args.latency_s, open_latency_s=0.0, info=draft_info(vocab_size=VOCAB, tokenizer_size=VOCAB)
    )
    name = "specdec.v1.DraftService"
    return FakeService(
        "draft",
        backend,
        DraftServicer(backend),
        lambda servicer, server: server.add(add_DraftServiceServicer_to_server, servicer, name),
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=("target", "draft"))
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--latency-s", type=float, default=0.003)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--max-waiting", type=int, default=64)
    parser.add_argument("--max-wait-s", type=float, default=10.0)
    for name in ("certfile", "keyfile", "ca-certs"):
        parser.add_argument(f"--ssl-{name}")
    parser.add_argument("--otlp-traces-endpoint")
    args = parser.parse_args()
    make = make_target if args.role == "target" else make_draft
    return run(
        lambda: make(args),
        ServerSettings(
            port=args.port,
            ssl_certfile=args.ssl_certfile,
            ssl_keyfile=args.ssl_keyfile,
            ssl_ca_certs=args.ssl_ca_certs,
            otlp_traces_endpoint=args.otlp_traces_endpoint,
        ),
    )


if __name__ == "__main__":
    sys.exit(main())
