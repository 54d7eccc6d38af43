"""Batch jobs: files of requests in OpenAI's batch format, answered by an engine or by many (needs the extra `serve`)."""

from .job import BatchReport, Worker, WorkerLostError, run_batch
from .results import ResultFile
from .rows import Row, RowReader
from .worker import Answer, EngineWorker

__all__ = [
    "Answer",
    "BatchReport",
    "EngineWorker",
    "ResultFile",
    "Row",
    "RowReader",
    "Worker",
    "WorkerLostError",
    "run_batch",
]
