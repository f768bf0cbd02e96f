"""Pools from YAML: what is taken, and what is refused by name."""

import pytest

from resmgr import Invalid, Node, Pool
from resmgr.cli import main
from resmgr.static import load_pools

GOOD = """
h800: {hardware: H800, nodes: [{name: a, total: 8}, {name: b, total: 8, labels: {zone: x}}]}
judge: {hardware: judge, total: 32, backend: serverless, labels: {region: eu}}
"""


def test_a_file_gives_its_pools(tmp_path):
    (tmp_path / "pools.yaml").write_text(GOOD)
    assert load_pools(tmp_path / "pools.yaml") == [
        Pool("h800", hardware="H800", nodes=[Node("a", 8), Node("b", 8, labels={"zone": "x"})]),
        Pool("judge", hardware="judge", total=32, backend="serverless", labels={"region": "eu"}),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must map pool names"),
        ("- a", "must map pool names"),
        ("a: 3", "a: 3 must be a mapping with hardware"),
        ("a: {hardware: H, totl: 3}", "a: unknown key 'totl'; did you mean 'total'"),
        ("a: {hardware: H, nodes: [{name: n, total: 1, label: {}}]}", "a.nodes: unknown key 'label'"),
        ("a: {hardware: H, total: many}", r"a: Expected `float`, got `str` - at `\$.total`"),
        ("a: {hardware: H, total: -1}", "pools.yaml: a: Pool.total=-1"),
        ("a: {total: 1}", "missing required field `hardware`"),
        ("a: [", "pools.yaml"),
        ("a: {hardware: H, nodes: 3}", "Expected `array`, got `int`"),
        ("1: {hardware: H, total: 1}", "1: the name of a pool must be a text"),
        ("a: {hardware: H, total: 1}\na: {hardware: H, total: 2}", "a is there 2 times"),
    ],
)
def test_a_wrong_file_is_refused_by_its_key(tmp_path, text, message):
    (tmp_path / "pools.yaml").write_text(text)
    with pytest.raises(Invalid, match=message):
        load_pools(tmp_path / "pools.yaml")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(Invalid, match=r"none.yaml: .*No such file"):
        load_pools(tmp_path / "none.yaml")


@pytest.mark.real
def test_the_command_applies_a_file_and_replaces_only_on_demand(tmp_path, capsys):
    url, file = f"embedded:{tmp_path / 'store'}?persist=1", tmp_path / "pools.yaml"
    (tmp_path / "store").mkdir(mode=0o700)
    file.write_text(GOOD)
    try:
        assert main(["apply", url, str(file)]) == 0
        assert main(["apply", url, str(file)]) == 0
        assert "h800: 16 of H800" in capsys.readouterr().out
        file.write_text(
            "h800: {hardware: H800, total: 4}\njudge: {hardware: judge, total: 8}\nnew: {hardware: n, total: 1}"
        )
        assert main(["apply", url, str(file)]) == 2
        out, err = capsys.readouterr()
        assert out == "new: 1 of n\n" and "'h800' is registered with" in err and "'judge' is registered with" in err
        assert "--replace" in err
        assert main(["apply", url, str(file), "--replace"]) == 0
        assert "h800: 4 of H800" in capsys.readouterr().out
    finally:
        main(["stop", url])
