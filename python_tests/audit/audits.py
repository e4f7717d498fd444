"""Small audited servers for the tests of the audit trail."""

from engines import make
from killed_server import call

from secureafl_ext.audit import Audited, log


def lines(folder, *kinds):
    return [line for line in log.read(folder) if not kinds or line.kind in kinds]


def start(folder, engine="fused", **settings):
    return Audited(make(engine), folder, **{"keep": "recent", **settings})


def calls(server, first, last):
    for number in range(first, last):
        call(server, number)
