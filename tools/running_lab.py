"""Find a JupyterLab that already serves a folder: `python running_lab.py FOLDER` prints its address, or ends with status 1."""

import sys
from pathlib import Path

from jupyter_server.serverapp import list_running_servers


def address(folder: str, servers: list[dict] | None = None) -> str | None:
    """The address, with its token, of a server whose root is `folder`; None where none runs."""
    wanted = Path(folder).resolve()
    for server in list_running_servers() if servers is None else servers:
        if Path(server["root_dir"]).resolve() == wanted:
            return f"{server['url']}lab" + (f"?token={server['token']}" if server["token"] else "")
    return None


if __name__ == "__main__":
    found = address(sys.argv[1])
    if found is None:
        sys.exit(1)
    print(f"JupyterLab already runs for {sys.argv[1]}/: open {found}\nTo end it: jupyter lab stop, or Ctrl+C where it was started.")
