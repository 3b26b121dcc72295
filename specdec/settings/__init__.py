"""Settings of every service. Each option is one line: name, type, default, help and range."""

from specdec.settings.access import API_KEY_VARIABLE, AccessSettings, ClientLimits
from specdec.settings.connections import ConnectionSettings
from specdec.settings.gateway import GatewaySettings
from specdec.settings.limits import RequestLimits
from specdec.settings.lookup import LookupSettings
from specdec.settings.model import AUTOTUNE, DTYPES, QUANTIZATIONS, ModelSettings, SchedulerSettings
from specdec.settings.services import DraftSettings, ServerSettings, TargetSettings
from specdec.settings.speculative import SpeculativeSettings

__all__ = [
    "API_KEY_VARIABLE",
    "AUTOTUNE",
    "DTYPES",
    "QUANTIZATIONS",
    "AccessSettings",
    "ClientLimits",
    "ConnectionSettings",
    "DraftSettings",
    "GatewaySettings",
    "LookupSettings",
    "ModelSettings",
    "RequestLimits",
    "SchedulerSettings",
    "ServerSettings",
    "SpeculativeSettings",
    "TargetSettings",
]
