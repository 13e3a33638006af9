"""What all tests share: no test reads or writes this user's own state."""

import os

import pytest


@pytest.fixture(scope="session", autouse=True)
def own_state_directory(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Runs and launches that zapex remembers are those of this session of tests."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))
