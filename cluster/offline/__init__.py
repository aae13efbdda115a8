"""The engine from Python, without a server."""

from airside.cluster.offline.llm import LLM as LLM
from airside.cluster.offline.llm import RequestOutput as RequestOutput
from airside.cluster.offline.llm import SamplingParams as SamplingParams
from airside.cluster.offline.session import OfflineError as OfflineError
