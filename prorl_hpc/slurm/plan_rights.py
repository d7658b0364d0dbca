"""Whether this user may use what a component asks for: account, quality of service, reservation, partition."""

from __future__ import annotations

from collections.abc import Iterator

from prorl_hpc.slurm.plan_asks import Ask, nearest, setting_of
from prorl_hpc.slurm.site import Site
from prorl_hpc.slurm.site_records import Partition


def right_problems(ask: Ask, site: Site, partition: Partition) -> Iterator[str]:
    """Where no accounting answers, only what the partition itself allows is known."""
    yield from _account(ask, site, partition)
    yield from _qos(ask, site, partition)
    yield from _reservation(ask, site, partition)


def _enforced(site: Site) -> bool:
    enforced = site.settings.words("AccountingStorageEnforce")
    return any(word in ("associations", "limits", "qos", "safe", "all") for word in enforced)


def _account(ask: Ask, site: Site, partition: Partition) -> Iterator[str]:
    setting = setting_of(ask.cluster, ask.part.name, "account")
    account, allowed = ask.value("account"), partition.allow_accounts
    mine = None
    if site.associations is not None and _enforced(site):
        mine = {a.account for a in site.associations}
        if not mine:
            yield f"{setting}: user {site.user} has no account at this site: ask the admins for one"
            return
        if account and account not in mine:
            yield f"{setting}={account} is not one of {site.user}'s; {nearest(account, mine, 'accounts')}"
            return
        here = {a.account for a in site.associations if a.partition in ("", partition.name)}
        if account and account not in here:
            yield f"{setting}={account} may not be used in partition {partition.name}; {nearest(account, here, 'accounts')}"
            return
    if account and ((allowed is not None and account not in allowed) or account in partition.deny_accounts):
        told = nearest(account, allowed, "accounts") if allowed is not None else "choose another account or partition"
        yield f"{setting}={account} may not use partition {partition.name}; {told}"
    elif not account and mine and allowed is not None and not mine & set(allowed):
        yield f"{setting}: none of {site.user}'s accounts may use partition {partition.name}; {nearest('', allowed, 'accounts')}"


def _qos(ask: Ask, site: Site, partition: Partition) -> Iterator[str]:
    qos = ask.value("qos")
    if not qos:
        return
    setting, account = setting_of(ask.cluster, ask.part.name, "qos"), ask.value("account")
    if site.associations is not None:
        mine = {q for a in site.associations if not account or a.account == account for q in a.qos}
        if site.qos and qos not in site.qos:
            yield f"{setting}={qos}: there is no such QOS; {nearest(qos, mine or site.qos, 'yours')}"
            return
        if mine and qos not in mine and _enforced(site):
            whose = f"{site.user}'s with account {account}" if account else f"{site.user}'s"
            yield f"{setting}={qos} is not one of {whose}; {nearest(qos, mine, 'QOS')}"
            return
    allowed = partition.allow_qos
    if (allowed is not None and qos not in allowed) or qos in partition.deny_qos:
        told = nearest(qos, allowed, "QOS") if allowed is not None else "choose another QOS or partition"
        yield f"{setting}={qos} may not be used in partition {partition.name}; {told}"
    limit = site.qos[qos].max_minutes if qos in site.qos else None
    if limit is not None and ask.minutes and ask.minutes > limit:
        yield f"{ask.told('time')} is {ask.minutes} minutes, {setting}={qos} allows at most {limit} (MaxWall)"


def _reservation(ask: Ask, site: Site, partition: Partition) -> Iterator[str]:
    setting, name = setting_of(ask.cluster, ask.part.name, "reservation"), ask.value("reservation")
    if not name:
        if partition.needs_reservation:
            yield f"{setting} is empty, partition {partition.name} takes only jobs of a reservation (ReqResv=YES)"
        return
    for one in name.split(","):
        found = site.reservations.get(one)
        if found is None:
            yield f"{setting}={name}: there is no reservation {one}; {nearest(one, site.reservations, 'reservations')}"
        elif found.users and site.user not in found.users and not found.accounts:
            yield f"{setting}={one} is for {', '.join(found.users)}, not for {site.user}: ask the admins"
        elif found.partition and found.partition != partition.name:
            yield f"{setting}={one} lies in partition {found.partition}, this component asks for {partition.name}"
