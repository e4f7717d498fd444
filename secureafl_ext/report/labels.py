"""Words for axes and measures, shared by the tables and the plots."""

from .tables import TablePlan

AXES = {
    "malicious": "share of malicious clients",
    "delay": "largest delay in rounds",
    "degree": "degree of non-IID data",
    "clients": "number of clients",
    "parameters": "number of parameters",
    "quantile": "alpha",
    "max_norm": "G, the clipping norm",
    "rounds": "round",
    "history_dtype": "data type of the history",
    "state": "state of the server",
}


def axis(name: str) -> str:
    return AXES.get(name, name)


def measure(plan: TablePlan) -> str:
    """What the numbers of a table are, without the attack success."""
    if plan.table.source != "runs":
        return {"memory": "GB", "bench": "seconds per round"}[plan.table.source]
    if plan.table.measure == "estimation_error":
        return "relative estimation error"
    return "RMSE" if plan.base.dataset == "udacity" else "test error"
