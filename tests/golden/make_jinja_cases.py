"""What Jinja2, set up as Hugging Face sets it up, makes of small templates: tests/golden/jinja-cases.json.

Usage: python3 make_jinja_cases.py > jinja-cases.json      (needs the jinja2 package, 3.1)
"""
import datetime
import json
import sys

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment


class Generation(Extension):
    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller):
        return caller()


def raise_exception(message):
    raise jinja2.exceptions.TemplateError(message)


def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                      sort_keys=sort_keys)


ENV = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                    extensions=[Generation, jinja2.ext.loopcontrols])
ENV.filters["tojson"] = tojson
ENV.globals["raise_exception"] = raise_exception
ENV.globals["strftime_now"] = lambda text: datetime.datetime.now().strftime(text)

DATA = {
    "i": 7, "neg": -3, "f": 2.5, "one": 1.0, "big": 18446744073709551615, "t": True, "n": None,
    "s": "Hello World", "u": "na\u00efve \u4f60\u597d \U0001F600!", "pad": "  x \u00a0\u3000\n",
    "empty": "", "list": [3, 1, 2], "words": ["b", "A", "c", "a"], "nested": [[1, 2], [3, 4]],
    "none_list": [], "d": {"b": 2, "a": 1, "C": [True, None, 1.5]}, "dd": {"x": {"y": "z"}},
    "people": [{"name": "Bo", "age": 30, "tags": ["x"]}, {"name": "al", "age": 25},
               {"name": "Cy", "age": 30, "tags": []}],
    "quote": "it's \"q\" \\ \n\t\x01\x7f\u200b", "html": "<b>&'\"</b>", "odd": {"items": 1, "get": 2},
    "floats": [0.1, 1e16, 1e15, 1e-5, 0.0001, 123456789.125, -0.0, 1e100, 3.0],
}

# Each line is one expression, printed by {{ ... }} with the names of DATA as variables.
EXPRESSIONS = r"""
1 + 2 * 3 - 4 / 2
7 // 2, -7 // 2, 7 % 3, -7 % 3, 7 % -3, 7.5 // 2, -7.5 % 2
2 ** 10, 2 ** -1, -2 ** 2, 2 ** 3 ** 2
1 / 2, 4 / 2, 1e3, 1_000, 0x1f, 0b101, 0o17
i + 0.5, t + 1, -t, +t, not i, -f
'a' + 'b' ~ 1 ~ none ~ true ~ 1.0
'ab' * 3, 3 * 'ab', [1] * 2, 'x' * -1
[1] + [2, 3], (1,) + (2,)
1 == 1.0, true == 1, 'a' == 'a', [1, 2] == [1, 2], {'a': 1} == {'a': 1.0}, none == false
1 < 2 < 3, 1 < 3 < 2, 'a' < 'b', [1, 2] < [1, 3], 1 != 2, 2 >= 2
'a' in 'abc', 'x' not in 'abc', 1 in [1, 2], 'a' in d, 'zz' in d, 1 in (1,)
not 1 in [2]
not true or true and false
(none or 'x'), ('' or 0), (1 and 2), (0 and 2)
'yes' if i > 5 else 'no', 'yes' if false
1 if false else 2 if false else 3
missing, missing is defined, missing ~ 'x', missing|default('d'), missing|length, not missing
missing == missing, missing == none, missing in [1], 'a' in missing
d.a, d['a'], d.zz, d['zz'] is undefined, d.items()|list, odd.items is callable, odd['items']
list[0], list[-1], list[5] is defined, nested[1][0], nested.1.0, list[true]
s[0], s[-1], u[6], u[-2], s[99] is undefined
list[::-1], list[1:], list[:-1], list[::2], list[5:], list[-2:], list[2:0:-1], list[10:0:-1]
u[::-1], u[6:8], s[:5], s[-5:], s[::3], s[5:2], s[:none]
(1, 2, 3)[1:], range(5)[1:3], range(10)[::3]
(1,), (), (1, 2), [], {}, {'a': 1, 2: 'b', none: none}, [[]], {'k': (1,)}
none, true, false, None, True, False, 1.0, [none, true, 1.5, 'x']
quote, [quote], ['a"b'], ["it's"], [u]
floats, big, 1e22, 1.5e-7, 100000000000000000000.0
'a\nb\t\x41\u00e9\'\"\\\q\101', "it's", 'a' 'b'
s|upper, s|lower, s|title, 'hELLO wORLD-foo (bar)'|title, 'hELLO wORLD'|capitalize
'\u00e9\u00df\u4f60'|upper, '\u00c9'|lower, s.swapcase is defined
pad|trim, [pad|trim], 'xxaxx'|trim('x'), none|trim, 5|trim
s|length, u|length, list|length, d|length, list|count
list|first, list|last, none_list|first is undefined, u|first, u|last, d|first
list|join, list|join(', '), words|join('-'), people|join(',', attribute='name'), 'abc'|join('.')
list|sort, words|sort, words|sort(case_sensitive=true), list|sort(reverse=true), people|sort(attribute='age,name')|map(attribute='name')|list
people|sort(attribute='age', reverse=true)|map(attribute='name')|join(' ')
list|reverse|list, s|reverse, words|unique|list, [1, 1.0, true, 2]|unique|list
list|sum, people|sum(attribute='age'), list|min, list|max, words|min, words|max, none_list|max is undefined
people|max(attribute='age') == people[0], [1, 2]|sum(start=10)
people|map(attribute='name')|list, people|map(attribute='zz', default='-')|list, words|map('upper')|list
people|selectattr('tags')|map(attribute='tags.0')|list, [1.4, 2.6]|map('round')|list, ['1', 'x']|map('int', 5)|list
list|select('odd')|list, list|reject('odd')|list, [0, 1, '']|select|list, list|select('>', 1)|list
people|selectattr('age', 'equalto', 30)|map(attribute='name')|list, people|selectattr('tags')|list|length
people|rejectattr('age', 'eq', 30)|list|length, people|selectattr('tags', 'defined')|list|length
people|rejectattr('tags', 'undefined')|map(attribute='name')|list
d|dictsort, d|dictsort(true), {'x': 2, 'y': 1}|dictsort(by='value'), d|dictsort(reverse=true)
d|items|list, missing|items|list, d|list, d.keys()|list, d.values()|list, d.get('a'), d.get('q'), d.get('q', 9)
d.keys(), d.values(), dd.items()
d|tojson, d|tojson(indent=2), d|tojson(sort_keys=true), d|tojson(separators=(',', ':'))
floats|tojson, u|tojson, u|tojson(ensure_ascii=true), quote|tojson, [none, true]|tojson, []|tojson(indent=1), {}|tojson(indent=1)
{1: 2, none: 3, true: 4, 1.5: 5}|tojson, (1, 2)|tojson, big|tojson, html|tojson, nested|tojson(indent='\t')
'a-b-c'|replace('-', '+'), 'aaa'|replace('a', 'b', 2), 'abc'|replace('', '.'), 5|replace('5', 'x')
'5'|int, 'x'|int, 'x'|int(3), '0x1f'|int(base=16), '7.9'|int, 3.9|int, -3.9|int, none|int, true|int, ' 12 '|int, '1_0'|int
'1.5'|float, 'x'|float, 'x'|float(2.5), 3|float, 'inf'|float, 'nan'|float, '1e3'|float
2.5|round, 3.5|round, 2.675|round(2), 2.1|round(0, 'ceil'), 2.9|round(method='floor'), 7|round, 1234.5|round(-2), 15|round(-1)
-3|abs, neg|abs, -2.5|abs, (-3)|abs
1|string, none|string, 1.0|string, [1]|string, s|string
html|escape, html|e|e, html|safe, ('<i>'|safe) + '<b>', '<b>' ~ ('<i>'|safe), ('<i>'|safe)|upper, '<b>' + ('&'|e)
['<b>'|safe], ('a,b'|safe).split(',')
'a\nb\n\nc'|indent, 'a\nb'|indent(2, true), 'a\n\nb'|indent(2, blank=true), 'a\nb'|indent('>')
s|list, 'ab'|list, range(3)|list, range(1, 7, 2)|list, range(5, 0, -2)|list, range(3), range(0, 4, 2), range(0)|list
s.split(), s.split('o'), s.split('o', 1), '  a  b '.split(), ' a b c '.split(none, 1), 'a,b,'.split(','), ''.split(), ''.split(',')
'a b c'.rsplit(' ', 1), ' a b c '.rsplit(), ' a b c '.rsplit(none, 1), 'a-b-c'.rsplit('-', maxsplit=1)
pad.strip(), 'xyax'.strip('xy'), '  a '.lstrip() ~ '|', '  a '.rstrip() ~ '|', '\n\na\n'.strip('\n'), '\u00e9a\u00e9'.strip('\u00e9')
s.startswith('He'), s.endswith('ld'), s.startswith(('x', 'H')), s.endswith(('x', 'y')), s.startswith('W', 6), s.startswith('')
s.upper(), s.lower(), 'hello wORLD it\'s'.title(), 'hELLO'.capitalize(), ''.capitalize()
s.replace('o', '0'), s.replace('o', '0', 1), u.find('\u597d'), u.rfind('x'), s.find('o', 5), s.rfind('o'), s.count('l'), 'aaa'.count('aa'), s.index('W'), s.find('', 11), s.find('', 12)
','.join(words), ''.join([]), '\n'.join(['a'])
'a\nb\r\nc\n'.splitlines(), 'a\n\nb'.splitlines(true), ''.splitlines()
'12'.isdigit(), 'a1'.isalnum(), 'ab'.isalpha(), ' \n'.isspace(), 'AB1'.isupper(), 'ab1'.islower(), ''.isdigit()
'prefix-x'.removeprefix('prefix-'), 'x.py'.removesuffix('.py'), 'a=b=c'.partition('='), 'a=b=c'.rpartition('='), 'abc'.partition('z')
i is number, f is float, i is integer, t is integer, t is number, t is boolean, s is string, d is mapping, list is sequence
s is sequence, d is sequence, missing is sequence, missing is iterable, i is iterable, s is iterable, list is iterable, none is none
t is true, t is false, 1 is true, 0 is false, i is odd, i is even, 9 is divisibleby 3, 9 is divisibleby(2), i is sameas 7, 1 is sameas true
1 is eq 1, 1 is equalto(1), 1 is ne 2, 2 is gt 1, 1 is lt 2, 1 is ge 1, 1 is le 0, 'a' is in 'abc', 1 is not in [1], 1 is in [1, 2]
range is callable, s is callable, missing is callable, s.upper is callable, 'abc' is lower, 'ABC' is upper, 'upper' is filter, 'zz' is filter, 'odd' is test
i is not none, i is not string, not i is string, i is defined and i > 3, i + 1 is number
people|map(attribute='age') is iterable, people|map(attribute='age') is sequence, (none_list|map('upper')) and 'always', d.items() is sequence
missing|default, missing|d('x'), ''|default('x'), ''|default('x', true), none|default('x'), none|default('x', boolean=true), 0|default(1)
dict(a=1, b=2), dict([['x', 1]]), dict({'a': 1}, b=2), namespace(a=1).a, namespace().zz is defined
d.update is defined, d.pop, s.__class__, s.zz is defined, none.x is defined, i.x is defined
{'a': {'b': [1, {'c': 2}]}}.a.b[1].c
[1, 2, 3,], {'a': 1,}, (1, 2,)
'%s' is string, ' ' is string, '1' + 1 ~ ''|length
s|attr('upper')(), d|attr('a') is defined
people[0].tags[0], people[1].tags is defined, people[1]['tags'] is defined, people[-1].name
1 in [1] and 2 not in [1], 1 == 1 is true
-list[0], -2|abs, i|string|length, 'a' in 'a' ~ 'b', '2' + 3 ~ 4
1.5 is float and 1 is not float, 'x' if x is defined else 'y'
list.index(2), list.count(3), (1, 1).count(1), list.copy()
"""

# Whole templates; `messages` is DATA.
TEMPLATES = [
    "plain text\n", "a\n\n", "{{ 1 }}\n", "{{ 1 }}\n\nx", "\n{{ 1 }}", "a\r\nb\rc\n", "",
    "{% if true %}\nx\n{% endif %}\ny", "  {% if true %}  \n x\n  {% endif %}\ny", "a {% if true %} b {% endif %} c",
    "  {%+ if true %}\n x\n  {%+ endif %}\ny", "a\n  {%- if true -%}\n  x  \n  {%- endif -%}\n y",
    "{% if true +%}\nx{% endif %}", "a  {{- 1 -}}  b", "a  {{+ 1 }}  b", "{{-5}} {{ -5 }}", "  {# c #}\nx", "a {#- c -#} b", "{# multi\nline #}\nx",
    "{# c +#}\nx", "x{# {{ 1 }} {% if %} #}y", "  {# a #} {# b #}\nz", "{{ '}}' }}{{ \"%}\" }}{{ {'a': {'b': 1}}.a.b }}",
    "{% raw %}{{ x }} {% if %}{% endraw %}!", "{%- raw -%}  {{ x }}  {%- endraw -%}  !", "  {% raw %}\n a\n  {% endraw %}\nb",
    "{% if i == 1 %}a{% elif i == 7 %}b{% else %}c{% endif %}", "{% if missing %}a{% else %}b{% endif %}", "{% if 1, 2 %}tuple{% endif %}",
    "{% for x in list %}{{ loop.index }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ x }};{% endfor %}",
    "{% for x in list %}{{ loop.previtem }}<{{ x }}>{{ loop.nextitem }}|{% endfor %}", "{% for x in list %}{{ loop.previtem is defined }}{{ loop.cycle('a', 'b') }}{{ loop.depth }}{{ loop.depth0 }}{% endfor %}",
    "{% for x in none_list %}x{% else %}empty{% endfor %}", "{% for x in missing %}x{% else %}empty{% endfor %}", "{% for x in list if x > 1 %}{{ loop.index }}/{{ loop.length }}:{{ x }} {% else %}none{% endfor %}",
    "{% for x in list if x > 9 %}x{% else %}none{% endfor %}", "{% for k, v in d.items() %}{{ k }}={{ v }};{% endfor %}", "{% for k, v in d|items %}{{ k }}={{ v }};{% endfor %}", "{% for k in d %}{{ k }}{% endfor %}",
    "{% for a, b in nested %}{{ a }}-{{ b }} {% endfor %}", "{% for (a, b) in nested %}{{ a }}{% endfor %}", "{% for c in u %}{{ c }}.{% endfor %}", "{% for x in range(3) %}{% for y in range(2) %}{{ loop.index }}{{ x }}{{ y }} {% endfor %}{{ loop.index }};{% endfor %}",
    "{% for x in range(10) %}{% if x == 2 %}{% continue %}{% endif %}{% if x == 5 %}{% break %}{% endif %}{{ x }}{% endfor %}", "{% for x in 1, 2 %}{{ x }}{% endfor %}", "{% for x in list %}{{ x }}{% endfor %}{{ x is defined }}",
    "{% set x = 1 %}{% for i in [1, 2] %}{{ x }}{% set x = 5 %}{{ x }}{% endfor %}{{ x }}", "{% set x = 1 %}{% if true %}{% set x = 2 %}{% endif %}{{ x }}", "{% if false %}{% set x = 2 %}{% endif %}{{ x is defined }}",
    "{% set ns = namespace(x=0, l=[]) %}{% for i in list %}{% set ns.x = ns.x + i %}{% set ns.l = ns.l + [i] %}{% endfor %}{{ ns.x }}{{ ns.l }}", "{% set a, b = 1, 2 %}{{ a }}{{ b }}", "{% set t = 1, 2 %}{{ t }}", "{% set t = 1, %}{{ t }}",
    "{% set ns = namespace() %}{% set a, ns.b = 1, 2 %}{{ a }}{{ ns.b }}", "{% set x %}a{{ 1 }}{% set y = 2 %}{% endset %}{{ x }}{{ y is defined }}", "{% set x | upper | trim %} abc {% endset %}[{{ x }}]", "{% set ns = namespace() %}{% set ns.x %}q{% endset %}{{ ns.x }}",
    "{% set x = 'a' if i > 3 else 'b' %}{{ x }}", "{% set loop = 3 %}{{ loop }}", "{% for x in list %}{% set loop = 3 %}{{ loop }}{% endfor %}",
    "{% macro m(a, b=2, c=a) %}{{ a }}{{ b }}{{ c }}{% endmacro %}{{ m(1) }},{{ m(1, 3) }},{{ m(1, c=9) }},{{ m(b=1, a=2) }},{{ m() }}", "{% macro m() %}{{ varargs }}{{ kwargs }}{% endmacro %}{{ m(1, 2, x=3) }}", "{% macro m() %}x{% endmacro %}{{ m }}{{ m() | upper }}{{ m() ~ m() }}",
    "{% macro m(x) %}{% set y = x %}{{ y }}{{ z }}{% endmacro %}{% set z = 5 %}{{ m(1) }}{{ y is defined }}", "{% macro f(n) %}{{ n }}{% if n > 0 %}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(5) }}", "{% set x = 1 %}{% macro m() %}{{ x }}{% endmacro %}{% set x = 2 %}{{ m() }}",
    "{% set c = namespace(n=0) %}{% macro m() %}{% set c.n = c.n + 1 %}{% endmacro %}{{ m() }}{{ m() }}{{ c.n }}", "{% macro w(t) %}<{{ t }}>{{ caller() }}</{{ t }}>{% endmacro %}{% call w('b') %}in{{ i }}{% endcall %}", "{% macro each(l) %}{% for x in l %}{{ caller(x, loop.index) }}{% endfor %}{% endmacro %}{% call(v, n) each(list) %}[{{ n }}:{{ v }}]{% endcall %}",
    "{% macro m() %}{{ caller is defined }}{% endmacro %}{{ m() }}", "{% for x in list %}{% macro m() %}{{ x }}{% endmacro %}{{ m() }}{% endfor %}", "{% macro outer() %}{% macro inner(x) %}({{ x }}){% endmacro %}{{ inner(1) }}{% endmacro %}{{ outer() }}",
    "{% filter upper %}abc{{ s }}{% endfilter %}", "{% filter trim | replace('a', 'b') %} aa {% endfilter %}", "{% with a=1, b=2 %}{{ a }}{{ b }}{% set c = 3 %}{% endwith %}{{ a is defined }}{{ c is defined }}", "{% with %}{% set q = 1 %}{{ q }}{% endwith %}{{ q is defined }}", "{% set a = 5 %}{% with a=1, b=a %}{{ a }}{{ b }}{% endwith %}{{ a }}",
    "{% generation %}text {{ i }}{% set x = 1 %}{% endgeneration %}{{ x is defined }}", "{% for x in list %}{% generation %}{{ x }}{{ loop.index }}{% endgeneration %}{% endfor %}", "{%- generation -%}\n a \n{%- endgeneration -%}", "{% set g = list|map('string') %}{{ g|list }}{{ g|list }}", "{% set g = list|select %}{% if g %}yes{% endif %}{{ 3 in g }}{{ 3 in g }}",
    "{{ raise_exception('boom ' ~ i) }}", "x{% for q in list %}{{ raise_exception('no') }}{% endfor %}", "{{ missing.x }}", "{{ missing['x'] }}", "{{ missing() }}", "{{ missing + 1 }}", "{{ 'a' + missing }}", "{{ -missing }}", "{{ missing < 1 }}", "{{ d.zz.y }}", "{{ d['zz'].y }}", "{{ list[9].x }}", "{{ none_list[0].role }}", "{{ s.zz() }}", "{{ none.x.y }}", "{{ none[0].x }}", "{{ i[0].x }}", "{{ 'abc'[7].x }}", "{{ (1, 2)[7].x }}", "{{ people[0].zz.q }}", "{{ nope('x') }}",
    "{% for x in list %}{{ loop.previtem.x }}{% endfor %}", "{% for x in list %}{{ loop.nextitem.x }}{% endfor %}", "{{ (none_list|first).x }}", "{{ (none_list|last).x }}", "{{ (1 if false).x }}", "{% macro m(a) %}{{ a.x }}{% endmacro %}{{ m() }}", "{{ d.update({'a': 1}) }}", "{{ list.append(1) }}", "{{ s.__class__.x }}", "{{ namespace().q.r }}", "{% macro m() %}{{ caller() }}{% endmacro %}{{ m() }}",
    "{{ 1 + 'a' }}", "{{ 'a' + 1 }}", "{{ none + 'a' }}", "{{ [1] + (1,) }}", "{{ 1 / 0 }}", "{{ 1 % 0 }}", "{{ 1 < 'a' }}", "{{ 1 in 5 }}", "{{ 1 in 'abc' }}", "{{ -'a' }}", "{{ 5() }}", "{{ none|length }}", "{{ 5|list }}", "{% for x in 5 %}{% endfor %}", "{% for a, b in [[1]] %}{% endfor %}", "{% for a, b in [[1, 2, 3]] %}{% endfor %}", "{{ s.split('') }}", "{{ s.index('zz') }}", "{{ ','.join([1]) }}", "{{ range(1000000) }}", "{{ [1, 'a']|sort }}", "{{ 5|items|list }}", "{{ range|tojson }}", "{{ (list|map('string'))|length }}", "{{ (list|map('string'))|last }}", "{{ list|map('nosuch')|list }}", "{{ {[]: 1} }}", "{{ s[::0] }}", "{{ s['a':] }}", "{{ d[1:] }}", "{{ n[1:] }}", "{% set i.x = 1 %}", "{% macro m(a) %}{% endmacro %}{{ m(1, 2) }}", "{% macro m(a) %}{% endmacro %}{{ m(b=1) }}", "{{ missing|int }}",
    "{{ 1 + }}", "{{ }}", "{% if %}{% endif %}", "{% if true %}", "{% for x in %}{% endfor %}", "{% for x %}{% endfor %}", "{% endif %}", "{% nosuch %}", "{{ 1 | nosuch }}", "{{ 1 is nosuch }}", "{{ 'abc }}", "{{ (1 }}", "{{ [1) }}", "{{ 1 ", "{% if true ", "{# x", "{% raw %}x", "{% set 1 = 2 %}", "{% set true = 2 %}", "{% for loop in list %}{% endfor %}", "{{ a b }}", "{{ ! }}", "{{ 1 is odd is even }}", "{% macro m(a=1, b) %}{% endmacro %}", "{{ f(a=1, 2) }}", "{% else %}", "{% set x %}a", "{{ x.'a' }}", "{% for x in list %}{% else %}{% else %}{% endfor %}", "{{ '\\x4' }}",
]

# Whole chat templates in the manner of well-known model families, and what they are given.
CHATML = """{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

HEADERS = """{{- bos_token }}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("26 Jul 2024") %}
    {%- else %}
        {%- set date_string = "none" %}
    {%- endif %}
{%- endif %}
{#- The system message is taken out, so that it can be put first. #}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|header|>system<|end|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
{%- endif %}
{{- "Today Date: " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message }}
{{- "<|eot|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|header|>' + message['role'] + '<|end|>\\n\\n'+ message['content'] | trim + '<|eot|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|header|>assistant<|end|>\\n\\n' -}}
        {{- '{"name": "' + tool_call.name + '", ' }}
        {{- '"parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- "}" }}
        {{- "<|eot|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|header|>ipython<|end|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|header|>assistant<|end|>\\n\\n' }}
{%- endif %}
"""

INSTRUCT = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace() %}
{%- set ns.index = 0 %}
{%- for message in loop_messages %}
    {%- if not (message.role == "tool" or (message.tool_calls is defined and message.tool_calls is not none)) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("After the optional system message, conversation roles must alternate user/assistant/user/assistant/...") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}
                        {{- '"' + key + '": "' + val + '"' }}
                    {%- else %}
                        {{- '"' + key + '": ' + val|tojson }}
                    {%- endif %}
                    {%- if not loop.last %}
                        {{- ", " }}
                    {%- endif %}
                {%- endfor %}
                {{- "}}" }}
                {%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" }}{%- endif %}
            {%- endfor %}
            {{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token }}
    {%- else %}
        {{- raise_exception("Only user and assistant roles are supported, with the exception of an initial optional system message!") }}
    {%- endif %}
{%- endfor %}
"""

TURNS = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set first_user_prefix = messages[0]['content'] + '\\n\\n' -%}
    {%- else -%}
        {%- set first_user_prefix = messages[0]['content'][0]['text'] + '\\n\\n' -%}
    {%- endif -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- if (message['role'] == 'assistant') -%}
        {%- set role = "model" -%}
    {%- else -%}
        {%- set role = message['role'] -%}
    {%- endif -%}
    {{ '<start_of_turn>' + role + '\\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'image' -%}
                {{ '<start_of_image>' }}
            {%- elif item['type'] == 'text' -%}
                {{ item['text'] | trim }}
            {%- endif -%}
        {%- endfor -%}
    {%- else -%}
        {{ raise_exception("Invalid content type") }}
    {%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{'<start_of_turn>model\\n'}}
{%- endif -%}
"""

TYPESCRIPT = """{%- macro render_type(spec, required, depth=0) -%}
    {%- if spec.type == "array" -%}
        {%- if spec['items'] -%}{{ render_type(spec['items'], [], depth + 1) ~ '[]' }}{%- else -%}any[]{%- endif -%}
    {%- elif spec.enum -%}
        {{- '"' + spec.enum|join('" | "') + '"' -}}
    {%- elif spec.type is defined and spec.type is iterable and spec.type is not mapping and spec.type[0] is defined and spec.type is not string -%}
        {{- spec.type | join(' | ') -}}
    {%- elif spec.type == "object" -%}
        {{- "{\\n" }}
        {%- for name, value in (spec.properties or {}).items() -%}
            {{- '  ' * (depth + 1) ~ name ~ ('' if name in (spec.required or []) else '?') ~ ': ' }}
            {{- render_type(value, spec.required or [], depth=depth + 1) }}
            {%- if value.default is defined %} // default: {{ value.default if value.default is string else value.default|tojson }}{% endif -%}
            {{- ",\\n" -}}
        {%- endfor -%}
        {{- '  ' * depth ~ "}" -}}
    {%- else -%}
        {{- spec.type|default('any') -}}
    {%- endif -%}
{%- endmacro -%}
{%- for tool in tools or [] %}
// {{ tool.function.description | default("no description") | replace("\\n", "\\n// ") }}
type {{ tool.function.name | upper }} = (_: {{ render_type(tool.function.parameters, []) }}) => any;
{% endfor %}
{% for message in messages if message.role != 'system' %}
{{ loop.index }}/{{ loop.length }} {{ message.role }}: {{ message.content }}
{% endfor %}
"""
IDIOMS = {"chatml": CHATML, "headers": HEADERS, "instruct": INSTRUCT, "turns": TURNS, "typescript": TYPESCRIPT}

TOOLS = [{"type": "function", "function": {"name": "get_weather", "description": "Weather\nof a <city>", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}, "unit": {"type": "string", "enum": ["c", "f"], "default": "c"},
    "days": {"type": ["integer", "null"], "maximum": 18446744073709551615, "default": 1.0}, "tags": {"type": "array", "items": {"type": "string"}},
    "place": {"type": "object", "properties": {"lat": {"type": "number"}}, "required": ["lat"]}}, "required": ["city"]}}},
    {"type": "function", "function": {"name": "now", "return": "x", "parameters": {"type": "object", "properties": {}}}}]


def turn(*pairs):
    return [{"role": role, "content": content} for role, content in pairs]


CALL = [{"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "K\u00f6ln", "n": 1.0, "x": None}}}]
INPUTS = [
    {"messages": turn(("user", " Hello "))},
    {"messages": turn(("system", " Be brief. "), ("user", "Hi"), ("assistant", " Yes? "), ("user", "\u4f60\u597d <b>"))},
    {"messages": turn(("user", "a"), ("assistant", "b")), "add_generation_prompt": False},
    {"messages": turn(("user", "a"), ("user", "b"))},
    {"messages": []},
    {"messages": turn(("user", "weather?")) + [{"role": "assistant", "content": None, "tool_calls": CALL}, {"role": "tool", "content": "20"}], "tools": TOOLS},
    {"messages": turn(("system", "S"), ("user", "weather?")), "tools": TOOLS},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": " x "}, {"type": "image"}, {"type": "text", "text": "y"}]}]},
    {"messages": [{"role": "user", "content": None}]},
    {"messages": turn(("user", "x"), ("wizard", "y"))},
]


def run(template, variables):
    case = {"template": template}
    try:
        compiled = ENV.from_string(template)
    except jinja2.exceptions.TemplateSyntaxError:
        return {**case, "error": "", "kind": "syntax"}
    try:
        return {**case, "text": compiled.render(**variables)}
    except jinja2.exceptions.UndefinedError as error:
        return {**case, "error": str(error), "kind": "undefined"}
    except jinja2.exceptions.SecurityError as error:
        return {**case, "error": str(error), "kind": "undefined"}
    except jinja2.exceptions.TemplateError as error:
        kind = "raised" if type(error) is jinja2.exceptions.TemplateError else "other"
        return {**case, "error": str(error), "kind": kind}
    except Exception as error:  # whatever Python says of a bad operand
        return {**case, "error": str(error), "kind": "other"}


def main():
    prefix = "{%- set " + " %}{%- set ".join(f"{k} = messages.{k}" for k in DATA) + " -%}\n"
    cases = [run(prefix + "{{ " + e + " }}", {"messages": DATA})
             for e in EXPRESSIONS.strip().split("\n")]
    cases += [run(prefix + t, {"messages": DATA}) for t in TEMPLATES]
    for case in cases:
        case["template"] = case["template"].removeprefix(prefix)
    chats = []
    for name, template in IDIOMS.items():
        for given in INPUTS:
            given = {"tools": None, "add_generation_prompt": True, **given}
            result = run(template, {**given, "bos_token": "<s>", "eos_token": "</s>", "documents": None})
            chats.append({"name": name, **given, **result})
            del chats[-1]["template"]
    json.dump({"prefix": prefix, "messages": DATA, "cases": cases, "idioms": IDIOMS,
               "chats": chats}, sys.stdout, indent=0)
    print()


main()
