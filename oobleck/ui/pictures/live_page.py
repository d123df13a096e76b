"""Makes a report follow its run: a script that fetches the page again and puts the new one in place of the old one."""

from __future__ import annotations

import base64
import hashlib

_INTERVAL_MS = 2000

# What a reader has opened or closed stays so, and a text that is being selected is not taken away.
_SCRIPT = f"""
let last = "";
async function follow() {{
  const gone = document.getElementById("gone");
  try {{
    if (!document.hidden && getSelection().isCollapsed) {{
      const answer = await fetch(location.pathname);
      if (!answer.ok) throw new Error(answer.statusText);
      const text = await answer.text();
      if (text !== last) {{
        last = text;
        const page = new DOMParser().parseFromString(text, "text/html");
        const name = one => one.querySelector("summary").textContent;
        const was = new Map([...document.querySelectorAll("details")].map(one => [name(one), one.open]));
        for (const one of page.querySelectorAll("details"))
          if (was.has(name(one))) one.open = was.get(name(one));
        document.querySelector("main").replaceWith(page.querySelector("main"));
        document.title = page.title;
      }}
    }}
    gone.hidden = true;
  }} catch (error) {{
    gone.hidden = false;
  }}
  setTimeout(follow, {_INTERVAL_MS});
}}
follow();
"""
_BODY_END = "</body>"
_GONE = (
    '<p id="gone" hidden style="position:fixed;inset:auto 0 0 0;margin:0;padding:8px 16px;text-align:center;'
    'color:#fff;background:#c62f2f">No answer from <code>oobleck ui</code>: this page is not up to date.</p>'
)

_SCRIPT_HASH = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()

LIVE_HEADERS = {
    "Content-Security-Policy": (
        f"default-src 'none'; script-src 'sha256-{_SCRIPT_HASH}'; connect-src 'self'; style-src 'unsafe-inline'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
"""HTTP headers of the page: this script runs and no other, and other sites do not learn its address."""


def live_page(page: str) -> str:
    """Return a report's page with the script that keeps it up to date."""
    head, _, tail = page.rpartition(_BODY_END)
    return f"{head}{_GONE}<script>{_SCRIPT}</script>{_BODY_END}{tail}"
