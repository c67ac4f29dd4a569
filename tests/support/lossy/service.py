"""`magnetar` with such journal writers: python -m support.lossy.service COMMAND ...."""

from unittest.mock import patch

from magnetar.cli.main import main
from support.lossy import lossy_components

if __name__ == "__main__":
    with patch("magnetar.cli.wiring.service.os_components", lossy_components):
        main()
