"""Drafts that are open before their targets: how many rounds a text has then depends on no clock.

Without this a fast target, or a draft's service that stands still for a moment, ends a short text before any round.
"""

import asyncio
from collections import defaultdict


def draft_first(target, draft, patch=setattr):
    """Let ``target.open`` wait until ``draft.open`` has answered for the same session; both are backends or classes.

    ``patch`` replaces an attribute, as ``setattr`` and ``monkeypatch.setattr`` do.
    """
    opening = defaultdict(set)
    open_target, open_draft = target.open, draft.open

    async def opened_after(*args, **kwargs):
        await asyncio.sleep(0)  # the decoding loop asks both at once
        for answered in [*opening[_session_id(args)]]:
            await answered.wait()
        return await open_target(*args, **kwargs)

    async def answering(*args, **kwargs):
        answered = asyncio.Event()
        opening[_session_id(args)].add(answered)
        try:
            return await open_draft(*args, **kwargs)
        finally:
            opening[_session_id(args)].discard(answered)
            answered.set()

    patch(target, "open", opened_after)
    patch(draft, "open", answering)


def _session_id(args):
    """Of the call of a backend, or of its class with the backend before the session's specification."""
    return next(arg.session_id for arg in args if hasattr(arg, "session_id"))
