"""What the library tells: log records without handlers, and nothing printed."""

import ast
import logging
from pathlib import Path

import pytest
import torch

import secureafl_ext.server
from secureafl_ext import SecureAFL


def test_the_library_logs_and_leaves_handlers_to_the_program(tmp_path, caplog):
    """No handler, no output: a program decides where logs go."""
    caplog.set_level("DEBUG", "secureafl_ext")
    server = SecureAFL(torch.zeros(4), 3)
    server.save(tmp_path / "server")
    SecureAFL.load(tmp_path / "server")
    said = [(record.name, record.levelname, record.getMessage()) for record in caplog.records]
    made = ("secureafl_ext.server.core", "DEBUG", "server of 3 clients, 4 parameters, engine Fused on cpu")
    assert said == [
        made,
        ("secureafl_ext.server.checkpoints", "INFO", f"checkpoint {tmp_path / 'server'} written at version 0"),
        made,
        ("secureafl_ext.server.server", "INFO", f"checkpoint {tmp_path / 'server'} loaded at version 0"),
    ]
    names = [name for name in logging.root.manager.loggerDict if name.startswith("secureafl_ext")]
    assert names and not any(logging.getLogger(name).handlers for name in names)


PRODUCTION = ("server", "engines", "rules", "checkpoint", "flower", ".")


@pytest.mark.parametrize("folder", PRODUCTION)
def test_no_print_in_the_library(folder):
    files = list((Path(secureafl_ext.server.__file__).parent.parent / folder).glob("*.py"))
    assert files
    calls = [
        (file.name, node.lineno)
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert calls == []
