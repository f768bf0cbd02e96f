"""What is asked of Kubernetes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envmanager.backends.podspec import Owner, PodTemplate, merged, pod, prefetch

TEMPLATE = PodTemplate(image="registry.example/envs:1", env="shop:all", spec={"nodeSelector": {"pool": "cpu"}})
OWNER = Owner.new("trainer-1")


def test_every_object_says_whose_it_is():
    for made in (pod(TEMPLATE, OWNER, "t"), prefetch(TEMPLATE, OWNER)):
        labels = made["metadata"]["labels"]
        assert labels["envmanager/owner"] == "trainer-1" and labels["envmanager/run"] == OWNER.run
        assert made["metadata"]["name"].startswith("trainer-1-")
    assert OWNER.mine("environment").endswith("envmanager/role=environment") and f"!={OWNER.run}" in OWNER.orphans
    assert Owner.new("a").run != Owner.new("a").run


def test_limits_and_no_privileges():
    for made in (pod(TEMPLATE, OWNER, "t")["spec"], prefetch(TEMPLATE, OWNER)["spec"]["template"]["spec"]):
        (container,) = made["containers"]
        assert container["resources"]["requests"] == container["resources"]["limits"]
        assert set(container["resources"]["limits"]) == {"cpu", "memory"}
        assert container["imagePullPolicy"] == "IfNotPresent" and container["image"] == TEMPLATE.image
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert made["automountServiceAccountToken"] is False and made["nodeSelector"] == {"pool": "cpu"}


def test_a_pod_serves_and_ends_by_itself():
    spec = pod(TEMPLATE, OWNER, "secret")["spec"]
    (container,) = spec["containers"]
    assert container["command"][:3] == ["envmanager", "serve-env", "shop:all"]
    assert {"name": "ENVMANAGER_TOKEN", "value": "secret"} in container["env"]
    assert container["readinessProbe"]["httpGet"] == {"path": "/health", "port": 8800}
    assert spec["restartPolicy"] == "Never" and spec["activeDeadlineSeconds"] == 6 * 3600


def test_names_are_distinct():
    assert len({pod(TEMPLATE, OWNER, "t")["metadata"]["name"] for _ in range(100)}) == 100


plain = st.recursive(
    st.integers() | st.text(max_size=3),
    lambda inner: st.dictionaries(st.text(max_size=2), inner, max_size=3) | st.lists(inner, max_size=2),
    max_leaves=6,
)
trees = st.dictionaries(st.text(max_size=2), plain, max_size=3)


@given(trees, trees)
def test_merging_keeps_what_is_not_named(base, over):
    both = merged(base, over)
    assert set(both) == set(base) | set(over)
    assert all(both[key] == base[key] for key in base.keys() - over.keys())
    assert merged(base, {}) == base and merged({}, over) == over


@pytest.mark.parametrize("wrong", [{"image": ""}, {"env": ""}, {"lifetime_s": 0}, {"grace_s": -1}])
def test_bad_templates(wrong):
    with pytest.raises(ValueError):
        PodTemplate(**({"image": "i", "env": "e"} | wrong))


@pytest.mark.parametrize("name", ["", "Me", "a_b", "-a", "a" * 41])
def test_bad_owners(name):
    with pytest.raises(ValueError, match="lowercase"):
        Owner.new(name)
