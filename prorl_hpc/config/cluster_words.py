"""Settings of group ``cluster`` that become words of a script or of a command line: each must be one word, one line, or
what Slurm reads there."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator

from prorl_hpc.config.schema import ClusterConfig, ComponentConfig

_MAIL = {"NONE", "BEGIN", "END", "FAIL", "REQUEUE", "ALL", "INVALID_DEPEND", "STAGE_OUT", "TIME_LIMIT"}
_MAIL |= {"TIME_LIMIT_90", "TIME_LIMIT_80", "TIME_LIMIT_50"}
_BINDINGS = ("none", "no", "cores", "sockets", "threads", "ldoms", "rank", "rank_ldom", "auto", "boards")
_LISTS = ("map_cpu:", "mask_cpu:", "map_ldom:", "mask_ldom:")
_NAMES = (r"[\w.,+@:/=%-]+", "letters, digits and . , + @ : / = % _ -")
_HOSTS = (r"[\w.,+@:/\[\]-]+", "names of nodes, as in node[01-04,07],big1, or a file of them with its path")
_FEATURES = (r"[\w.,+@:/=%&|!()\[\]*-]+", "features, put together by & | , ( ) [ ] and *")
_LICENSES = (r"[\w.,+@:/=|;()-]+", "licenses, such as matlab:2,ansys@server:1")
_ALPHABETS = {"constraint": _FEATURES, "nodelist": _HOSTS, "exclude": _HOSTS, "licenses": _LICENSES}
"""What may stand in a word (others: _NAMES): all that Slurm reads there, nothing that only a shell would."""
_WORDS = ("account", "qos", "reservation")
_COMPONENT_WORDS = ("partition", *_WORDS, "constraint", "nodelist", "exclude", "gpu_type")
_TWICE = {
    "account": "account",
    "qos": "qos",
    "reservation": "reservation",
    "partition": "partition",
    "constraint": "constraint",
    "nodelist": "nodelist",
    "exclude": "exclude",
    "exclusive": "exclusive",
    "cpus-per-task": "cpus",
    "mem": "memory_gib",
    "gpus-per-node": "gpus",
    "licenses": "licenses",
    "mail-user": "mail_user",
    "mail-type": "mail_type",
}
"""sbatch's long names, and the settings of the same meaning."""


def cluster_words(cluster: ClusterConfig) -> Iterator[str]:
    """All that is wrong, each as one sentence."""
    for name in (*_WORDS, "licenses", "mail_user"):
        yield from _one_word("cluster", name, getattr(cluster, name))
    for part in ("rollout", "inference", "trainer"):
        yield from _component(f"cluster.{part}", getattr(cluster, part))
        yield from _twice(f"cluster.{part}", getattr(cluster, part).extra, getattr(cluster, part))
    yield from _mail(cluster)
    yield from _interface(cluster.interface)
    yield from _lines(cluster)
    yield from _twice("cluster", cluster.extra, cluster)
    images = [cluster.container.image, *(p.container for p in (cluster.rollout, cluster.inference, cluster.trainer))]
    if cluster.container.args and not any(images):
        yield f"cluster.container.args={cluster.container.args} has no effect without cluster.container.image"


def _component(where: str, component: ComponentConfig) -> Iterator[str]:
    for name in _COMPONENT_WORDS:
        yield from _one_word(where, name, getattr(component, name))
    if component.gpu_type and not component.gpus:
        yield f"{where}.gpu_type={component.gpu_type} without {where}.gpus: say how many GPUs of that type each node has"
    if component.gpu_type and re.search(r"[:=,]", component.gpu_type):
        yield f"{where}.gpu_type={component.gpu_type}: must be the type alone, such as a100; {where}.gpus has the number"
    if not component.cpu_bind:
        return
    if not re.fullmatch(r"[\w:,.*-]+", component.cpu_bind):
        yield f"{where}.cpu_bind={component.cpu_bind!r}: must be one word of letters, digits and : , . * _ -"
        return
    words = [word for word in component.cpu_bind.split(",") if word not in ("quiet", "q", "verbose", "v")]
    if not words or not (words[0].startswith(_LISTS) or (words[0] in _BINDINGS and len(words) == 1)):
        allowed = ", ".join([*_BINDINGS, *(f"{name}LIST" for name in _LISTS)])
        yield f"{where}.cpu_bind={component.cpu_bind}: must be one of {allowed}; quiet, or verbose, may come before it"


def _one_word(where: str, name: str, value: str) -> Iterator[str]:
    alphabet, allowed = _ALPHABETS.get(name, _NAMES)
    if value and (re.search(r"\s", value) or value.startswith("-")):
        yield f"{where}.{name}={value!r}: must be one word without blanks that does not begin with a dash"
    elif value and not re.fullmatch(alphabet, value):
        wrong = dict.fromkeys(sign for sign in value if not re.fullmatch(alphabet, sign))
        yield f"{where}.{name}={value!r} has {' '.join(map(ascii, wrong))} in it: must be {allowed}"


def _mail(cluster: ClusterConfig) -> Iterator[str]:
    unknown = [word for word in cluster.mail_type if word not in _MAIL]
    if unknown:
        yield f"cluster.mail_type={','.join(cluster.mail_type)}: {', '.join(unknown)} is none of {', '.join(sorted(_MAIL))}"
    if cluster.mail_user and not cluster.mail_type:
        yield f"cluster.mail_user={cluster.mail_user} gets no mail without cluster.mail_type, such as [END,FAIL]"


def _interface(interface: str) -> Iterator[str]:
    if not interface or re.fullmatch(r"[A-Za-z][A-Za-z0-9_.@-]{0,14}", interface):
        return
    try:
        network = ipaddress.ip_network(interface)
        if "/" in interface or network.num_addresses == 0:
            return
        reason = "an address alone is one node's; give the subnet with its length, such as 10.1.0.0/16"
    except ValueError as error:
        reason = str(error) if "/" in interface else f"{interface!r} is no name of an interface"
    yield f"cluster.interface={interface}: must be the name of an interface (ib0) or a subnet (10.1.0.0/16): {reason}"


def _lines(cluster: ClusterConfig) -> Iterator[str]:
    for module in cluster.modules:
        if not re.fullmatch(r"[A-Za-z0-9_./+:@=-]+", module):
            yield f"cluster.modules: {module!r} must be the name of one module, such as cuda/12.4; other lines go to cluster.setup"
    parts = [("cluster", cluster.setup)]
    parts += [(f"cluster.{name}", getattr(cluster, name).setup) for name in ("rollout", "inference", "trainer")]
    for where, lines in parts:
        for line in lines:
            if "\n" in line:
                yield f"{where}.setup: {line!r} must be a single line: make each line an entry of its own"
            elif line.rstrip().endswith("\\"):
                yield f"{where}.setup: {line!r} ends with a backslash, which would swallow what comes after: write it on one line"
    for line in cluster.sbatch_lines:
        if not line.startswith("#") or "\n" in line:
            yield f"cluster.sbatch_lines: {line!r} must be a single line that begins with #; shell lines go to cluster.setup"
        elif re.match(r"#SBATCH\s*(hetjob|packjob)\b", line):
            yield f"cluster.sbatch_lines: {line!r}: the components are decided by the plan: use cluster.<component>.nodes"


def _twice(where: str, extra: dict[str, str], settings: ClusterConfig | ComponentConfig) -> Iterator[str]:
    for option, value in extra.items():
        name = _TWICE.get(option)
        if name and getattr(settings, name, None):
            yield f"{where}.extra.{option}={value} and {where}.{name}={getattr(settings, name)} are the same: leave one out"
        if option in ("mem", "mem-per-cpu", "mem-per-gpu") and not re.fullmatch(r"\d+[KMGT]?", str(value)):
            yield f"{where}.extra.{option}={value}: must be a whole number with K, M, G or T behind it, such as 64G"
