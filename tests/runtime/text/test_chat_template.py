"""Chat templates render as in transformers, refuse what they cannot render, and cannot hang or fill the machine (CASES V03)."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from qwenrt.plugins import ConfigError, RequestError
from qwenrt.runtime.text.chat_template import MAX_REQUEST_BYTES, ChatTemplate

HI = [{"role": "user", "content": "hi"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a <city> & more: 'é', 社区",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def call(arguments: Any) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}


CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": HI,
    "system": [{"role": "system", "content": "Be brief."}, *HI],
    "unicode and tags": [{"role": "user", "content": " <b>社区</b> 👋🏽 <|im_end|> \n\n{{ 7 }} {% x %} \\n"}],
    "empty": [{"role": "user", "content": ""}],
    "turns": [
        *HI,
        {"role": "assistant", "content": "<think>\nwell\n</think>\n\nHello!"},
        {"role": "user", "content": "so?"},
    ],
    "reasoning": [*HI, {"role": "assistant", "content": "Hello!", "reasoning_content": "hm\n"}, *HI],
    "reasoning last": [*HI, {"role": "assistant", "content": "Hello!", "reasoning_content": "hm\n"}],
    "late system": [*HI, {"role": "system", "content": "Now in French."}],
    "tool turns": [
        {"role": "system", "content": "You know the weather."},
        {"role": "user", "content": "Weather in Paris and Rome?"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "I should ask.",
            "tool_calls": [call({"city": "Paris"}), call('{"city": "Rome"}')],
        },
        {"role": "tool", "content": '{"degrees": 20}', "tool_call_id": "1"},
        {"role": "tool", "content": "hot"},
        {
            "role": "assistant",
            "content": "20 and hot.",
            "tool_calls": [{"name": "weather", "arguments": {"city": "é<"}}],
        },
        {"role": "tool", "content": "cold"},
    ],
}


@pytest.fixture(scope="module")
def qwen3_template(qwen3_dir: Path) -> Iterator[ChatTemplate]:
    template = ChatTemplate.from_dir(qwen3_dir)
    assert template is not None
    yield template
    template.close()


@pytest.fixture(scope="module")
def reference(qwen3_dir: Path) -> Callable[..., str]:
    """transformers' own rendering of Qwen3's template."""
    reference = pytest.importorskip("transformers.utils.chat_template_utils")
    config = json.loads((qwen3_dir / "tokenizer_config.json").read_text())

    def render(messages: list[dict[str, Any]], **options: Any) -> str:
        return str(reference.render_jinja_template([messages], chat_template=config["chat_template"], **options)[0][0])

    return render


@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize("tools", [None, [], [WEATHER], [WEATHER, {"name": "flat", "n": 1.5, "ok": None}]])
def test_qwen3_renders_as_in_transformers(
    qwen3_template: ChatTemplate, reference: Callable[..., str], name: str, tools: list[Any] | None
) -> None:
    for thinking in (None, True, False):
        for generate in (True, False):
            options: dict[str, Any] = {"tools": tools, "add_generation_prompt": generate}
            if thinking is not None:
                options["enable_thinking"] = thinking
            assert qwen3_template.render(CONVERSATIONS[name], **options) == reference(CONVERSATIONS[name], **options)


@pytest.mark.slow
def test_qwen3_prompts_have_the_tokens_that_transformers_gives(
    qwen3_template: ChatTemplate, qwen3_dir: Path, qwen3: Any
) -> None:
    reference = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(qwen3_dir)
    messages = CONVERSATIONS["tool turns"]
    expected = reference.apply_chat_template(messages, tools=[WEATHER], add_generation_prompt=True)["input_ids"]
    assert qwen3.encode(qwen3_template.render(messages, tools=[WEATHER])) == expected


def test_the_generation_prompt_says_whether_to_think(qwen3_template: ChatTemplate) -> None:
    prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert qwen3_template.render(HI) == qwen3_template.render(HI, enable_thinking=True) == prompt
    assert qwen3_template.render(HI, enable_thinking=False) == prompt + "<think>\n\n</think>\n\n"


@pytest.mark.parametrize("value", ["false", "true", 0, 1, "", []])
def test_enable_thinking_is_a_boolean_or_nothing(qwen3_template: ChatTemplate, value: Any) -> None:
    with pytest.raises(RequestError, match=r"enable_thinking is .*true or false"):
        qwen3_template.render(HI, enable_thinking=value)


def test_arguments_that_the_template_does_not_read_are_refused(qwen3_template: ChatTemplate) -> None:
    with pytest.raises(RequestError, match="enable_thinkng is not an argument"):
        qwen3_template.render(HI, enable_thinkng=False)
    with (
        ChatTemplateFor("plain {{ messages[0].content }}") as plain,
        pytest.raises(RequestError, match="enable_thinking"),
    ):
        plain.render(HI, enable_thinking=False)
    with ChatTemplateFor("{{ mood }}") as moody:
        assert moody.render(HI, mood="good") == "good"


class ChatTemplateFor:
    """A template that is closed at the end of a block."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.template = ChatTemplate(*args, **kwargs)

    def __enter__(self) -> ChatTemplate:
        return self.template

    def __exit__(self, *_: object) -> None:
        self.template.close()


def render(source: str, messages: Any = HI, max_seconds: float = 2.0, **kwargs: Any) -> str:
    with ChatTemplateFor(source, max_seconds=max_seconds) as template:
        return template.render(messages, **kwargs)


# --- what is rendered ---

ANSWERED = {"role": "assistant", "content": "x"}

REFUSED: list[tuple[Any, str]] = [
    ([], "messages is empty"),
    ("hi", "messages is a str"),
    (None, "messages is a NoneType"),
    ({"role": "user"}, "messages is a dict"),
    (["hi"], r"messages\[0\] is a str"),
    ([*HI, {"role": "user"}], r"messages\[1\]\.content is missing"),
    ([{"content": "x"}], r"messages\[0\]\.role is 'None'"),
    ([{"role": "User", "content": "x"}], "role is 'User'; it must be one of system, user, assistant, tool"),
    ([{"role": ["user"], "content": "x"}], "role is"),
    ([{"role": "user", "content": None}], "content is missing or null"),
    ([{"role": "assistant", "content": None}], "content is missing or null"),
    ([{"role": "assistant", "content": None, "tool_calls": []}], "content is missing or null"),
    ([{"role": "user", "content": 5}], "content is a int"),
    ([{"role": "user", "content": ["x"]}], r"content\[0\] is a str"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], "'image_url'; it must be of type text"),
    ([{"role": "user", "content": [{"type": "text", "text": None}]}], "of type text and have a text"),
    ([{"role": "user", "content": "x", "tool_calls": [call({})]}], "only an assistant calls tools"),
    ([{**ANSWERED, "tool_calls": "x"}], "tool_calls is a str"),
    ([{**ANSWERED, "tool_calls": ["x"]}], r"tool_calls\[0\] is a str"),
    ([{**ANSWERED, "tool_calls": [{"function": None}]}], r"tool_calls\[0\]\.function is a NoneType"),
    ([{**ANSWERED, "tool_calls": [{"name": "x"}]}], r"tool_calls\[0\] must have a name"),
    ([{**ANSWERED, "tool_calls": [call(5)]}], r"tool_calls\[0\] must have a name"),
    ([{**ANSWERED, "reasoning_content": 5}], "reasoning_content is a int"),
    ([{"role": "user", "content": "x", 5: "y"}], "has the key '5'"),
    ([{"role": "user", "content": "a\ud800"}], "lone surrogate"),
    ([{"role": "user", "content": "x", "name": {1, 2}}], "must be JSON values"),
    ([{"role": "user", "content": "x", "name": float("nan")}], "must be JSON values"),
]


@pytest.mark.parametrize(("messages", "message"), REFUSED, ids=range(len(REFUSED)))
def test_bad_messages_are_refused_by_name(messages: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        render("{{ messages[0].content }}", messages)


@pytest.mark.parametrize("tools", ["x", {"a": 1}, ["x"], [None], 5])
def test_bad_tools_are_refused_by_name(tools: Any) -> None:
    with pytest.raises(RequestError, match="tools"):
        render("x", tools=tools)


def test_text_parts_are_joined_and_nulls_are_dropped() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "user", "content": parts, "name": None},
        {"role": "assistant", "content": None, "tool_calls": [call({})], "reasoning_content": None},
    ]
    source = "{% for m in messages %}[{{ m.content }}{% if m.name is defined %}!{% endif %}]{% endfor %}"
    assert render(source, messages) == "[a\nb][]"
    assert messages[0]["content"] is parts


def test_deep_and_large_messages_are_refused_in_bounded_time() -> None:
    deep: Any = "x"
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(RequestError, match="must be JSON values"):
        render("x", [{"role": "user", "content": "x", "extra": deep}])
    with pytest.raises(RequestError, match=f"at most {MAX_REQUEST_BYTES}"):
        render("x", [{"role": "user", "content": "x" * MAX_REQUEST_BYTES}])


def test_the_largest_prompt_still_renders() -> None:
    text = "社" * (2**22 - 1)
    assert render("{{ messages[0].content }}!", [{"role": "user", "content": text}]) == text + "!"
    with pytest.raises(RequestError, match="more than 4194304 characters"):
        render("{{ messages[0].content }}!!", [{"role": "user", "content": text}])


# --- where templates come from ---


def test_from_dir_reads_the_file_before_the_field(tmp_path: Path) -> None:
    assert ChatTemplate.from_dir(tmp_path) is None
    config = {"chat_template": "field {{ eos_token }}", "eos_token": {"content": "<end>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    for expected in ("field <end>", "file <end>"):
        template = ChatTemplate.from_dir(tmp_path)
        assert template is not None
        assert template.render(HI) == expected
        template.close()
        (tmp_path / "chat_template.jinja").write_text("file {{ eos_token }}")


def test_named_templates_are_chosen_by_the_tools(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools {{ tools|length }}"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    template = ChatTemplate.from_dir(tmp_path)
    assert template is not None
    assert [template.render(HI, tools=tools) for tools in (None, [], [{}])] == ["plain", "plain", "tools 1"]
    template.close()


@pytest.mark.parametrize(
    "field",
    [5, [], [{"name": "x", "template": "y"}], [{"template": "y"}], ["x"], "{% if %}", "{{ x", "x" * 300_000, {}],
)
def test_a_garbage_template_is_a_config_error(tmp_path: Path, field: Any) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": field}))
    with pytest.raises(ConfigError, match="chat_template"):
        ChatTemplate.from_dir(tmp_path)


def test_the_environment_is_that_of_transformers() -> None:
    source = (
        "{% for i in range(9) %}\n  {% if i == 3 %}{% break %}{% endif %}\n{{ i }},\n{% endfor %}\n"
        "{{ {'b': '<é>', 'a': [1, none, true]} | tojson }}{{ [1] | tojson(indent=2) }}"
        "{% generation %}kept{% endgeneration %}{{ strftime_now('%Y') | length }}{{ tools is none }}"
    )
    assert render(source) == '0,\n1,\n2,\n{"b": "<é>", "a": [1, null, true]}[\n  1\n]kept4True'
    with pytest.raises(RequestError, match="refused these messages: no such luck"):
        render("{{ raise_exception('no such luck') }}")
    with pytest.raises(RequestError, match="'nope' is undefined"):
        render("{{ nope.x }}")


# --- hostile templates ---

SLOW = {
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "filtered loops": "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
    "branching macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "shared lists": "{% set n = namespace(a=[1]) %}{% for i in range(60) %}{% set n.a = [n.a, n.a] %}{% endfor %}{{ n.a }}",
    "huge power": "{{ 10 ** (10 ** 9) }}",
    "squares": "{% set n = namespace(a=9) %}{% for i in range(40) %}{% set n.a = n.a * n.a %}{% endfor %}{{ n.a % 7 }}",
}
LARGE = {
    "repeat": "{{ 'a' * 10 ** 9 }}",
    "constant repeat": "{% set x = 'a' * 10000000000 %}",
    "list repeat": "{% set x = [1] * 10 ** 9 %}",
    "doubling": "{% set n = namespace(a='aa') %}{% for i in range(60) %}{% set n.a = n.a ~ n.a %}{% endfor %}",
    "doubling block": "{% set a = 'aa' %}" + "{% set a %}{{ a }}{{ a }}{% endset %}" * 60,
    "center": "{{ 'a' | center(10 ** 10) }}",
    "indent": "{{ 'a\nb' | indent(10 ** 10) }}",
    "format": "{{ '%10000000000d' % 1 }}",
    "format method": "{{ '{:>10000000000}'.format(1) }}",
    "ljust": "{{ 'a'.ljust(10 ** 10) }}",
    "join": "{{ range(99999) | join('a' * 99999) }}",
    "replace": "{{ ('a' * 99999).replace('a', 'b' * 99999) }}",
    "lipsum": "{{ lipsum(n=10 ** 6) }}",
    "long output": "{% for i in range(99999) %}" + "a" * 1000 + "{% endfor %}",
    "recursion": "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "recursive loop": "{% for x in [[1]] recursive %}{{ loop([[1]]) }}{% endfor %}",
    "range": "{% for i in range(10 ** 9) %}{% endfor %}",
}
REACHING = {
    "class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ messages.append.__globals__ }}",
    "attr filter": "{{ (''|attr('__class__')).__mro__ }}",
    "subscript": "{{ ''['__class__']['__mro__'] }}",
    "format": "{{ '{0.__class__.__mro__}'.format('') }}",
    "map attribute": "{{ (['']|map(attribute='__class__')|list)[0].__mro__ }}",
    "macro code": "{% macro f() %}{% endmacro %}{{ f.__code__.co_code }}",
    "cycler": "{{ cycler.__init__.__globals__.os }}",
    "namespace": "{{ namespace(__class__=1) }}",
    "mutation": "{{ messages.append(1) }}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import 'os' as os %}{{ os }}",
    "extends": "{% extends 'x' %}",
    "unknown filter": "{{ 'x' | shell }}",
}


@pytest.mark.parametrize("name", SLOW)
def test_a_template_without_end_is_refused_in_bounded_time(name: str) -> None:
    start = time.monotonic()
    with ChatTemplateFor(SLOW[name], max_seconds=0.2) as template, pytest.raises(RequestError, match="took more than"):
        template.render(HI)
    assert time.monotonic() - start < 10


@pytest.mark.parametrize("name", LARGE)
def test_a_template_of_unbounded_size_is_refused_in_bounded_memory(name: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(RequestError, match="the chat template"):
        render(LARGE[name], max_seconds=0.5)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000


@pytest.mark.parametrize("name", REACHING)
def test_a_template_reaches_nothing_outside(name: str) -> None:
    with pytest.raises(RequestError, match="refused these messages"):
        render(REACHING[name])


def test_rendering_goes_on_after_a_hostile_message() -> None:
    source = "{% for i in range(messages[0].content|int) %}{% for j in range(99999) %}{% endfor %}{% endfor %}ok"
    with ChatTemplateFor(source, max_seconds=0.2) as template:
        for _ in range(2):
            assert template.render([{"role": "user", "content": "1"}]) == "ok"
            with pytest.raises(RequestError, match=r"took more than 0\.2 s"):
                template.render([{"role": "user", "content": "99999"}])


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt, even where the tests were started with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupted_rendering_does_not_answer_the_next_one() -> None:
    source = "{% for i in range(messages[0].content|int) %}{% for j in range(9999) %}{% endfor %}{% endfor %}"
    with ChatTemplateFor(source + "ok {{ messages[0].content }}", max_seconds=5) as template:
        threading.Timer(0.3, signal.pthread_kill, (threading.get_ident(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            template.render([{"role": "user", "content": "50000"}])
        assert template.render([{"role": "user", "content": "1"}]) == "ok 1"


def test_a_process_that_was_killed_is_replaced_without_an_error() -> None:
    with ChatTemplateFor("ok") as template:
        assert template.render(HI) == "ok"
        process = template._process._process
        assert process is not None
        os.kill(process.pid, signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert template.render(HI) == "ok"


def test_a_process_that_cannot_render_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with ChatTemplateFor("ok") as template, pytest.raises(RequestError, match="ended with code 1"):
        template.render(HI)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with ChatTemplateFor("ok") as template, pytest.raises(ConfigError, match="cannot start /nowhere/python"):
        template.render(HI)


def test_threads_get_their_own_answers() -> None:
    answers: dict[int, str] = {}
    with ChatTemplateFor("{{ messages[0].content }}") as template:

        def work(number: int) -> None:
            for turn in range(20):
                answers[number] = template.render([{"role": "user", "content": f"{number} {turn}"}])
                assert answers[number] == f"{number} {turn}"

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert answers == {number: f"{number} 19" for number in range(8)}


def test_close_and_the_end_of_the_program_end_the_process() -> None:
    script = (
        "import sys; from qwenrt.runtime.text.chat_template import ChatTemplate\n"
        "t = ChatTemplate('ok'); t.render([{'role': 'user', 'content': 'x'}])\n"
        "print(t._process._process.pid, flush=True)\n"
        "if sys.argv[1] == 'kill': import os; os.kill(os.getpid(), 9)\n"
    )
    for how in ("end", "kill"):
        done = subprocess.run([sys.executable, "-c", script, how], capture_output=True, text=True, env=_environment())
        assert done.stderr == ""
        worker = int(done.stdout)
        deadline = time.monotonic() + 10
        while _alive(worker) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not _alive(worker)


def test_a_forked_process_renders_by_itself_and_leaves_its_parents_process_alone() -> None:
    script = (
        "import os, sys; from qwenrt.runtime.text.chat_template import ChatTemplate\n"
        "t = ChatTemplate('{{ messages[0].content }}'); say = lambda x: t.render([{'role': 'user', 'content': x}])\n"
        "say('x'); before = t._process._process.pid\n"
        "if os.fork() == 0: assert say('child') == 'child' and t._process._process.pid != before; sys.exit(3)\n"
        "if os.fork() == 0: sys.exit(4)\n"
        "print([os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(2)], say('parent'), t._process._process.pid == before)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=_environment())
    assert (done.stdout, done.stderr) in (("[3, 4] parent True\n", ""), ("[4, 3] parent True\n", ""))


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] != "Z"
    except FileNotFoundError:
        return False


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
