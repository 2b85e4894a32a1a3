// The template language: what Jinja2 gives, and what hostile templates and inputs get.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <random>
#include <string>

#include "engine/tokenizer/chat_template.h"
#include "tests/engine/chat_template_fixture.h"

namespace qwend {
namespace {

using Json = nlohmann::ordered_json;
using ::testing::HasSubstr;

TEST(Jinja, LanguageAsJinja2) {
  const Json golden = ReadTestJson("tests/golden/jinja-cases.json");
  const std::string prefix = golden["prefix"];
  ChatInput input;
  input.messages = golden["messages"];
  int texts = 0;
  for (const Json& entry : golden["cases"]) {
    const std::string source = entry["template"];
    SCOPED_TRACE(source);
    const auto parsed = ChatTemplate::Parse(prefix + source);
    if (entry.value("kind", "") == "syntax") {
      EXPECT_FALSE(parsed.ok());
      EXPECT_THAT(std::string(parsed.status().message()), HasSubstr("chat template, line "));
      continue;
    }
    ASSERT_TRUE(parsed.ok()) << parsed.status();
    const auto text = (*parsed)->Render(input);
    if (!entry.contains("error")) {
      ++texts;
      ASSERT_TRUE(text.ok()) << text.status();
      EXPECT_EQ(*text, entry["text"].get<std::string>());
      continue;
    }
    ASSERT_FALSE(text.ok()) << *text;
    EXPECT_EQ(text.status().code(), absl::StatusCode::kInvalidArgument);
    const std::string message(text.status().message());
    // What Python says of a bad operand is worded as it likes; what is undefined or raised is not.
    if (entry["kind"] == "raised") {
      EXPECT_EQ(message, entry["error"].get<std::string>());
    }
    if (entry["kind"] == "undefined") {
      EXPECT_EQ(WithoutLine(message), entry["error"].get<std::string>());
    }
  }
  EXPECT_GT(texts, 150);
}

TEST(Jinja, TextThatIsNotUtf8IsKept) {
  EXPECT_EQ(RenderMessages("{{ messages[0] | upper }}{{ messages[0] | length }}",
                           Json::array({"a\xff\xc3z"})),
            "A\xff\xc3Z4");
}

TEST(Jinja, WhatIsNotCoveredSaysSo) {
  EXPECT_THAT(RenderMessages("{% for x in [1] recursive %}{% endfor %}"),
              HasSubstr("recursive loops are not covered"));
  EXPECT_THAT(RenderMessages("{{ '%s' % 1 }}"), HasSubstr("is not covered"));
  EXPECT_THAT(RenderMessages("{{ '\\N{DASH}' }}"), HasSubstr("is not covered"));
}

std::string Repeat(std::string_view text, int times) {
  std::string out;
  for (int i = 0; i < times; ++i) out += text;
  return out;
}

// Each must end in an error that holds the given words, soon.
TEST(JinjaLimits, HostileTemplatesEndInAnError) {
  const struct {
    std::string source;
    const char* words;
  } cases[] = {
      {"{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}", "steps"},
      {"{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "levels deep"},
      {"{% set ns = namespace(x=[1]) %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}"
       "{% endfor %}",
       "for this input"},
      {"{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}"
       "{% endfor %}",
       "MiB"},
      {"{% set ns = namespace(x=[]) %}{% for i in range(999) %}{% set ns.x = [ns.x] %}{% endfor %}",
       "nested"},
      {"{% set ns = namespace(x=1) %}{% for i in range(999) %}{% for y in [ns.x] %}"
       "{% set ns.x = loop %}{% endfor %}{% endfor %}",
       "nested"},
      {"{% set ns = namespace() %}{% set ns.x = ns %}{{ ns }}", "levels deep"},
      {"{% set ns = namespace(x=1) %}{% for i in range(150) %}{% set ns.x = [ns.x, ns.x] %}"
       "{% endfor %}{% set a = ns.x %}{% set ns.x = 1 %}{% for i in range(150) %}"
       "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ a == ns.x }}",
       "steps"},
      {"{% set ns = namespace(x=1) %}{% for i in range(150) %}{% set ns.x = [ns.x, ns.x] %}"
       "{% endfor %}{{ ns.x }}",
       "o"},
      {"{{ 'x' * 999999999999 }}", "MiB"},
      {"{{ [1] * 999999999999 }}", "too often"},
      {"{{ range(10 ** 30) }}", "Range too big"},
      {"{{ range(10 ** 38) }}", "smaller numbers"},
      {"{{ 10 ** 39 }}", "too large"},
      {"{{ 2 ** 999999999999 }}", "too large"},
      {"{% for i in range(1000) %}{{ 'x' * 100000 }}{% endfor %}", "longer than 16 MiB"},
      {"{{ ('x' * 10000000)|replace('x', 'yyyyyyyy') }}", "MiB"},
      {"{{ ''|indent(99999) }}", "at most"},
      {"{{ [1]|tojson(indent=99999999) }}", "at most"},
      {"{{ " + Repeat("(", 5000) + "1" + Repeat(")", 5000) + " }}", "nested too deeply"},
      {"{{ " + Repeat("[", 5000) + Repeat("]", 5000) + " }}", "nested too deeply"},
      {"{{ " + Repeat("not ", 5000) + "1 }}", "nested too deeply"},
      {"{{ " + Repeat("- ", 5000) + "1 }}", "nested too deeply"},
      {"{{ 1" + Repeat(" + 1", 5000) + " }}", "too long"},
      {"{{ a" + Repeat(".b", 5000) + " }}", "too long"},
      {"{{ 1" + Repeat(" | abs", 5000) + " }}", "too long"},
      {"{{ 1" + Repeat(" if 1 else 1", 5000) + " }}", "nested too deeply"},
      {Repeat("{% if 1 %}", 5000) + Repeat("{% endif %}", 5000), "nested too deeply"},
      {Repeat("{% for " + Repeat("(", 1000) + "x" + Repeat(")", 1000) + " in [] %}", 1), "deeply"},
      {std::string(3 << 20, 'x'), "longer than 1 MiB"},
  };
  for (const auto& [source, words] : cases) {
    SCOPED_TRACE(source.substr(0, 100));
    const auto begin = std::chrono::steady_clock::now();
    const std::string result = RenderMessages(source);
    EXPECT_THAT(result.substr(0, 300), HasSubstr("error: "));
    EXPECT_THAT(result.substr(0, 300), HasSubstr(words));
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(60));
  }
}

TEST(JinjaLimits, DeepInputIsRefused) {
  Json deep = 1;
  for (int i = 0; i < 1000; ++i) deep = Json::array({std::move(deep)});
  EXPECT_THAT(RenderMessages("x", Json::array({deep})), HasSubstr("nested more than 200"));
  Json shallow = 1;
  for (int i = 0; i < 150; ++i) shallow = Json::array({std::move(shallow)});
  EXPECT_EQ(RenderMessages("{{ messages|tojson }}", shallow),
            Repeat("[", 150) + "1" + Repeat("]", 150));
}

TEST(JinjaLimits, OrdinaryDepthAndLengthAreAllowed) {
  EXPECT_EQ(RenderMessages("{{ 1" + Repeat(" + 1", 200) + " }}"), "201");
  EXPECT_EQ(RenderMessages("{{ " + Repeat("(", 60) + "1" + Repeat(")", 60) + " }}"), "1");
  EXPECT_EQ(RenderMessages("{% macro f(n) %}{% if n %}{{ f(n - 1) }}{% endif %}x{% endmacro %}"
                           "{{ f(40) }}"),
            Repeat("x", 41));
  Json messages = Json::array();
  for (int i = 0; i < 20000; ++i) messages.push_back({{"role", "user"}, {"content", "hello"}});
  ChatInput input;
  input.messages = messages;
  const auto qwen =
      ChatTemplate::Parse(ReadTestFile("tests/golden/templates/qwen3.5-0.8b.chat_template.jinja"));
  ASSERT_TRUE(qwen.ok());
  EXPECT_TRUE((*qwen)->Render(input).ok());
  input.messages = Json::array({{{"role", "user"}, {"content", std::string(8 << 20, 'x')}}});
  EXPECT_TRUE((*qwen)->Render(input).ok());
}

// Random changes of real templates: no crash, no endless run, and any text is a text.
TEST(JinjaFuzz, MutatedTemplatesEnd) {
  std::vector<std::string> seeds = {
      ReadTestFile("models/demo/chat_template.jinja"),
      ReadTestFile("tests/golden/templates/qwen3.chat_template.jinja"),
      ReadTestFile("tests/golden/templates/qwen3.5-0.8b.chat_template.jinja")};
  const Json golden = ReadTestJson("tests/golden/jinja-cases.json");
  for (const Json& entry : golden["cases"]) seeds.push_back(entry["template"]);
  for (const Json& idiom : golden["idioms"]) seeds.push_back(idiom);
  ChatInput input;
  input.messages = golden["chats"][5]["messages"];
  input.tools = golden["chats"][5]["tools"];

  std::mt19937 random(7);
  const auto pick = [&](size_t n) { return n == 0 ? 0 : random() % n; };
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(2);
  int rendered = 0;
  int runs = 0;
  while (std::chrono::steady_clock::now() < end) {
    std::string source = seeds[pick(seeds.size())];
    for (size_t i = 1 + pick(3); i > 0; --i) {
      const std::string& other = seeds[pick(seeds.size())];
      const size_t from = pick(other.size());
      const size_t at = pick(source.size());
      source.replace(at, pick(12), other.substr(from, pick(24)));
    }
    ++runs;
    const auto parsed = ChatTemplate::Parse(source);
    if (!parsed.ok()) continue;
    const auto text = (*parsed)->Render(input);
    if (text.ok()) ++rendered;
    EXPECT_TRUE(text.ok() || text.status().code() == absl::StatusCode::kInvalidArgument);
  }
  EXPECT_GT(runs, 100);
  EXPECT_GT(rendered, 10);
}

}  // namespace
}  // namespace qwend
