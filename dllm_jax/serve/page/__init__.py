"""The page at `/`: files as they are, sent with a policy that lets nothing in from elsewhere.

The page is a client of the routes like any other. It needs no build step; its script writes texts
with `textContent` alone.
"""

from importlib import resources

from starlette.responses import Response

FILES = {
    "page.html": "text/html",
    "page.css": "text/css",
    "page.js": "text/javascript",
    "replay.js": "text/javascript",
}
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "cache-control": "no-cache",
    "referrer-policy": "no-referrer",
    "vary": "accept",
    "x-content-type-options": "nosniff",
}


def is_browser(accept: str) -> bool:
    """Whether an Accept header names HTML, as browsers do and API clients do not."""
    return "text/html" in accept.lower()


def asset(name: str, has_key: bool) -> Response:
    """One of `FILES`.

    Args:
        has_key: Whether the server has a key; the page's curl commands then send it.
    """
    text = resources.files(__name__).joinpath(name).read_text(encoding="utf-8")
    if has_key:
        text = text.replace('data-key="no"', 'data-key="yes"', 1)
    return Response(text, media_type=FILES[name], headers=HEADERS)
