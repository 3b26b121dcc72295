"""A collector of OpenTelemetry in a process of tests: the official service, which keeps the spans it gets."""

from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as pb_grpc


def value_of(value):
    """An attribute's value as Python has it."""
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [value_of(each) for each in value.array_value.values]
    return getattr(value, kind)


class Span:
    """One span as it arrived."""

    def __init__(self, span, resource):
        self.service = {each.key: value_of(each.value) for each in resource.attributes}["service.name"]
        self.name = span.name
        self.trace_id = span.trace_id.hex()
        self.id = span.span_id.hex()
        self.parent_id = span.parent_span_id.hex()
        self.start_ns, self.end_ns = span.start_time_unix_nano, span.end_time_unix_nano
        self.attributes = {each.key: value_of(each.value) for each in span.attributes}
        self.failed = span.status.code == span.status.STATUS_CODE_ERROR


class Collector(pb_grpc.TraceServiceServicer):
    """Listens on a free port."""

    def __init__(self):
        self.spans = []

    def Export(self, request, context):
        for resource_spans in request.resource_spans:
            for scope in resource_spans.scope_spans:
                self.spans += [Span(span, resource_spans.resource) for span in scope.spans]
        return pb.ExportTraceServiceResponse()

    @contextmanager
    def listening(self):
        """The endpoint, for the time of the block."""
        server = grpc.server(ThreadPoolExecutor(4))
        pb_grpc.add_TraceServiceServicer_to_server(self, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            server.stop(grace=None).wait()

    def of_trace(self, trace_id):
        """The spans of a trace by service and name."""
        found = defaultdict(list)
        for span in self.spans:
            if span.trace_id == trace_id:
                found[span.service.removeprefix("tandem-"), span.name].append(span)
        return dict(found)
