"""Adapters whose libraries need an environment of their own: it is made once, in build/envmanager/."""

from pathlib import Path

import pytest
from tests.envmanager import peers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
HERE = Path(__file__).parent


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("gem", "7 environments keep the contract"),
        ("verifiers", "scored as written"),
        ("openenv", "played through OpenEnv's server and client"),
    ],
)
def test_an_adapter_in_its_own_environment(name, said):
    assert said in peers.run(name, HERE / f"peer_{name}.py")
