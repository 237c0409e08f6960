"""Expressions of the formats of JSON schemas; each holds to less than its format allows.

Source: RFC 3339 (dates and times), 4122, 5322, 1123, 2673, 4291 and 3986. Years are four digits.
"""

_HOUR, _60 = "(?:[01][0-9]|2[0-3])", "[0-5][0-9]"
_YEAR = "[12][0-9]{3}"
_LEAP = "(?:[12][0-9](?:0[48]|[2468][048]|[13579][26])|(?:1[26]|2[048])00)"
_MONTHS = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = f"(?:{_YEAR}-{_MONTHS}|{_LEAP}-02-29)"
_TIME = rf"{_HOUR}:{_60}:{_60}(?:\.[0-9]{{1,6}})?(?:Z|[+-]{_HOUR}:{_60})"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_LABEL = "[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,20}[a-zA-Z0-9])?"
_HOST = rf"{_LABEL}(?:\.{_LABEL}){{0,3}}"
_HEX = "[0-9a-fA-F]"
_WEEKS, _DAYS, _CLOCK = "[0-9]{1,4}W", "[0-9]{1,4}D", "T(?:[0-9]{1,3}H)?(?:[0-9]{1,3}M)?[0-9]{1,3}S"

FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": f"P(?:{_WEEKS}|{_DAYS}(?:{_CLOCK})?|{_CLOCK})",
    "uuid": f"{_HEX}{{8}}(?:-{_HEX}{{4}}){{3}}-{_HEX}{{12}}",
    "email": rf"[a-zA-Z0-9_+-]+(?:\.[a-zA-Z0-9_+-]+)*@{_LABEL}(?:\.{_LABEL}){{1,3}}",
    "hostname": _HOST,
    "ipv4": rf"{_BYTE}(?:\.{_BYTE}){{3}}",
    "ipv6": f"{_HEX}{{1,4}}(?::{_HEX}{{1,4}}){{7}}",
    "uri": rf"[a-z][a-z0-9+.-]*://{_HOST}(?::[0-9]{{1,4}})?(?:/[a-zA-Z0-9._~!$&'()*+,;=:@-]*)*",
}
