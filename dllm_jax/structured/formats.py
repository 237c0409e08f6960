"""Expressions of the formats of JSON schemas; each holds to less than its format allows.

Source: RFC 3339 (dates, times and, in its appendix, durations), 9562, 5322, 1123, 2673, 4291, 3986,
6901 and 4648. Years are four digits.
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
_LABEL = "[a-zA-Z0-9](?:-?[a-zA-Z0-9]){0,20}"  # no two hyphens in sequence: those are of IDNA
_HOST = rf"{_LABEL}(?:\.{_LABEL}){{0,3}}"
_HEX = "[0-9a-fA-F]"
_PATH = r"(?:/[a-zA-Z0-9._~!$&'()*+,;=:@-]*)*"
_URI = rf"[a-z][a-z0-9+.-]*://{_HOST}(?::[0-9]{{1,4}})?{_PATH}"
_EMAIL = rf"[a-zA-Z0-9_+-]+(?:\.[a-zA-Z0-9_+-]+)*@{_LABEL}(?:\.{_LABEL}){{1,3}}"
_N = "[0-9]{1,4}"
_CLOCK = f"T(?:{_N}H(?:{_N}M(?:{_N}S)?)?|{_N}M(?:{_N}S)?|{_N}S)"  # no unit is passed over
_DAYS = f"(?:{_N}D|{_N}M(?:{_N}D)?|{_N}Y(?:{_N}M(?:{_N}D)?)?)"
_POINTER = "(?:/(?:[^~/]|~[01])*)*"
_BASE64 = (
    "(?:[A-Za-z0-9{0}]{{4}})*(?:[A-Za-z0-9{0}][AQgw]==|[A-Za-z0-9{0}]{{2}}[AEIMQUYcgkosw048]=)?"
)
_SIGN = (
    r"(?:[a-zA-Z0-9 _,:;@/'<>=!%&~-]|\\[dwsDWS.*+?()\[\]{}|^$\\/]|\."
    r"|\[\^?(?:[a-zA-Z0-9_ .]|a-z|A-Z|0-9)+\])"
)
_SIGNS = rf"(?:{_SIGN}(?:[*+?]|\{{[1-9]\}})?)"


def _uuid(version: str) -> str:
    variant = "[89abAB]" if version != _HEX else _HEX
    return f"{_HEX}{{8}}-{_HEX}{{4}}-{version}{_HEX}{{3}}-{variant}{_HEX}{{3}}-{_HEX}{{12}}"


FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": f"P(?:{_DAYS}(?:{_CLOCK})?|{_CLOCK}|{_N}W)",
    "uuid": _uuid(_HEX),
    **{f"uuid{version}": _uuid(str(version)) for version in range(1, 9)},
    "email": _EMAIL,
    "idn-email": _EMAIL,
    "hostname": _HOST,
    "idn-hostname": _HOST.replace("A-Z", ""),
    "ipv4": rf"{_BYTE}(?:\.{_BYTE}){{3}}",
    "ipv6": f"{_HEX}{{1,4}}(?::{_HEX}{{1,4}}){{7}}",
    "uri": _URI,
    "url": _URI,
    "iri": _URI,
    "uri-template": _URI,
    "uri-reference": f"(?:{_URI}|{_PATH})",
    "iri-reference": f"(?:{_URI}|{_PATH})",
    "json-pointer": _POINTER,
    "relative-json-pointer": f"(?:0|[1-9][0-9]*)(?:#|{_POINTER})",
    "regex": rf"\^?(?:{_SIGNS}|\({_SIGNS}+(?:\|{_SIGNS}+)*\)[*+?]?)*\$?",
    "byte": _BASE64.format("+/"),
    "base64": _BASE64.format("+/"),
    "base64url": _BASE64.format("_-"),
}
