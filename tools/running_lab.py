"""Find a JupyterLab that already serves a folder.

`python running_lab.py FOLDER PAGE` prints the address of the page, or ends with status 1.
"""

import sys
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import urlsplit


def address(folder: str, servers: Iterable[dict], page: str) -> str | None:
    """Return the address of a page, with its token, at the server whose root is `folder`.

    Return None if there is no such server.
    """
    wanted = Path(folder).resolve()
    for server in servers:
        if Path(server["root_dir"]).resolve() == wanted:
            return f"{server['url']}lab/tree/{page}" + (
                f"?token={server['token']}" if server["token"] else ""
            )
    return None


if __name__ == "__main__":
    from jupyter_server.serverapp import list_running_servers

    found = address(sys.argv[1], list_running_servers(), sys.argv[2])
    if found is None:
        sys.exit(1)
    stop = f"{Path(sys.executable).parent / 'jupyter'} lab stop {urlsplit(found).port}"
    print(
        f"JupyterLab already runs for {sys.argv[1]}/: open {found}\n"
        f"To end it: {stop}, or Ctrl+C where it was started."
    )
