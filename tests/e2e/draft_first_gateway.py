"""``python -m tests.e2e.draft_first_gateway``: ``python -m gateway``, in which drafts are open before targets."""

import sys

from gateway.backends.draft import GrpcDraft
from gateway.backends.target import GrpcTarget
from gateway.main import main
from tests.draft_first import draft_first

draft_first(GrpcTarget, GrpcDraft)
sys.exit(main())
