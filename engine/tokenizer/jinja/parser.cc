#include "engine/tokenizer/jinja/parser.h"

#include <algorithm>
#include <array>
#include <utility>

#include "engine/tokenizer/jinja/builtins.h"
#include "engine/tokenizer/jinja/context.h"
#include "engine/tokenizer/jinja/print.h"
#include "engine/tokenizer/jinja/try.h"

namespace qwend::jinja {
namespace {

constexpr int kMaxNesting = 300;

template <typename Node>
std::unique_ptr<const Statement> NewStatement(int line, Node node) {
  return std::make_unique<const Statement>(Statement{line, std::move(node)});
}

bool IsOneOf(const Token& token, std::initializer_list<std::string_view> words) {
  return token.kind == Token::Kind::kName &&
         std::find(words.begin(), words.end(), token.text) != words.end();
}

}  // namespace

absl::StatusOr<Body> Parse(std::string_view source) {
  if (source.size() > kMaxSourceBytes) {
    return Error("the chat template is longer than ", kMaxSourceBytes >> 20, " MiB");
  }
  JINJA_ASSIGN(std::vector<Token> tokens, Tokenize(source));
  return Parser(std::move(tokens)).ParseTemplate();
}

absl::Status Parser::Nesting::Check() const {
  if (parser_.nesting_ <= kMaxNesting) return absl::OkStatus();
  return parser_.Fail(parser_.Current().line, "expressions or blocks are nested too deeply");
}

const Token& Parser::Ahead() const { return tokens_[std::min(position_ + 1, tokens_.size() - 1)]; }

Token Parser::Take() {
  Token token = tokens_[position_];
  if (position_ + 1 < tokens_.size()) ++position_;
  return token;
}

bool Parser::SkipName(std::string_view name) {
  if (!Current().IsName(name)) return false;
  Take();
  return true;
}

bool Parser::SkipOperator(std::string_view op) {
  if (!Current().IsOperator(op)) return false;
  Take();
  return true;
}

absl::Status Parser::Fail(int line, std::string_view what) const {
  return Error("chat template, line ", line, ": ", what);
}

absl::Status Parser::Unexpected() const {
  return Fail(Current().line, Cat("unexpected ", Current().Describe()));
}

absl::Status Parser::ExpectOperator(std::string_view op) {
  if (SkipOperator(op)) return absl::OkStatus();
  return Fail(Current().line, Cat("expected '", op, "', got ", Current().Describe()));
}

absl::StatusOr<std::string> Parser::ExpectName() {
  if (Current().kind == Token::Kind::kName) return Take().text;
  return Fail(Current().line, Cat("expected a name, got ", Current().Describe()));
}

absl::Status Parser::ExpectKeyword(std::string_view name) {
  if (SkipName(name)) return absl::OkStatus();
  return Fail(Current().line, Cat("expected '", name, "', got ", Current().Describe()));
}

absl::Status Parser::ExpectBlockEnd() {
  if (Current().kind != Token::Kind::kBlockEnd) {
    return Fail(Current().line, Cat("expected '%}', got ", Current().Describe()));
  }
  Take();
  return absl::OkStatus();
}

absl::StatusOr<Body> Parser::ParseTemplate() { return ParseBody({}); }

absl::StatusOr<Body> Parser::ParseBody(Words ends) {
  const Nesting nesting(*this);
  JINJA_CHECK(nesting.Check());
  const int begin = position_ == 0 ? 1 : tokens_[position_ - 1].line;
  Body body;
  while (Current().kind != Token::Kind::kEnd) {
    const int line = Current().line;
    const Token token = Take();
    if (token.kind == Token::Kind::kData) {
      body.push_back(NewStatement(line, Data{token.text}));
    } else if (token.kind == Token::Kind::kVariableBegin) {
      JINJA_ASSIGN(ExprPtr value, ParseTuple(/*with_conditional=*/true));
      if (Current().kind != Token::Kind::kVariableEnd) {
        return Fail(Current().line, Cat("expected '}}', got ", Current().Describe()));
      }
      Take();
      body.push_back(NewStatement(line, Output{std::move(value)}));
    } else {
      if (IsOneOf(Current(), ends)) return body;
      JINJA_CHECK(ParseStatement(body));
      JINJA_CHECK(ExpectBlockEnd());
    }
  }
  if (ends.size() == 0) return body;
  return Fail(begin, Cat("the block that begins here has no '", *(ends.end() - 1), "'"));
}

absl::StatusOr<Body> Parser::ParseBodyTo(std::string_view end) {
  JINJA_CHECK(ExpectBlockEnd());
  JINJA_ASSIGN(Body body, ParseBody({end}));
  Take();
  return body;
}

absl::Status Parser::ParseStatement(Body& body) {
  const int line = Current().line;
  JINJA_ASSIGN(const std::string word, ExpectName());
  if (word == "if") {
    JINJA_ASSIGN(If node, ParseIf());
    body.push_back(NewStatement(line, std::move(node)));
  } else if (word == "for") {
    JINJA_ASSIGN(For node, ParseFor());
    body.push_back(NewStatement(line, std::move(node)));
  } else if (word == "set") {
    return ParseSet(line, body);
  } else if (word == "macro") {
    JINJA_ASSIGN(MacroDefinition node, ParseMacro());
    body.push_back(NewStatement(line, std::move(node)));
  } else if (word == "call") {
    JINJA_ASSIGN(CallBlock node, ParseCallBlock());
    body.push_back(NewStatement(line, std::move(node)));
  } else if (word == "filter") {
    JINJA_ASSIGN(FilterBlock node, ParseFilterBlock());
    body.push_back(NewStatement(line, std::move(node)));
  } else if (word == "with") {
    JINJA_ASSIGN(With node, ParseWith());
    body.push_back(NewStatement(line, std::move(node)));
  } else if (word == "generation") {
    const int loops = std::exchange(loops_, 0);  // its body is a function to Jinja
    JINJA_ASSIGN(Body inner, ParseBodyTo("endgeneration"));
    loops_ = loops;
    body.push_back(NewStatement(line, With{{}, std::move(inner)}));
  } else if (word == "break" || word == "continue") {
    if (loops_ == 0) return Fail(line, Cat("'", word, "' outside of a loop"));
    body.push_back(NewStatement(line, Jump{word == "break"}));
  } else {
    static constexpr std::array<std::string_view, 8> kNotCovered = {
        "block", "extends", "include", "import", "from", "print", "autoescape", "do"};
    const bool known = std::find(kNotCovered.begin(), kNotCovered.end(), word) != kNotCovered.end();
    return Fail(line, known ? Cat("the statement '", word, "' is not covered")
                            : Cat("unknown statement ", ReprText(word)));
  }
  return absl::OkStatus();
}

absl::StatusOr<If> Parser::ParseIf() {
  If node;
  while (true) {
    JINJA_ASSIGN(ExprPtr condition, ParseTuple(/*with_conditional=*/false));
    JINJA_CHECK(ExpectBlockEnd());
    JINJA_ASSIGN(Body body, ParseBody({"elif", "else", "endif"}));
    node.branches.emplace_back(std::move(condition), std::move(body));
    const Token end = Take();
    if (end.text == "elif") continue;
    if (end.text == "endif") return node;
    JINJA_ASSIGN(node.otherwise, ParseBodyTo("endif"));
    return node;
  }
}

absl::StatusOr<For> Parser::ParseFor() {
  For node;
  const int line = Current().line;
  ++loops_;
  JINJA_ASSIGN(node.target, ParseTarget(/*with_namespace=*/false));
  --loops_;
  JINJA_CHECK(ExpectKeyword("in"));
  JINJA_ASSIGN(node.iterable, ParseTuple(/*with_conditional=*/false));
  if (SkipName("if")) {
    JINJA_ASSIGN(node.condition, ParseExpression());
  }
  if (Current().IsName("recursive")) return Fail(line, "recursive loops are not covered");
  JINJA_CHECK(ExpectBlockEnd());
  ++loops_;
  auto body = ParseBody({"else", "endfor"});
  --loops_;
  JINJA_ASSIGN(node.body, std::move(body));
  if (Take().text == "endfor") return node;
  JINJA_ASSIGN(node.otherwise, ParseBodyTo("endfor"));
  return node;
}

absl::Status Parser::ParseSet(int line, Body& body) {
  JINJA_ASSIGN(Target target, ParseTarget(/*with_namespace=*/true));
  if (SkipOperator("=")) {
    JINJA_ASSIGN(ExprPtr value, ParseTuple(/*with_conditional=*/true));
    body.push_back(NewStatement(line, Set{std::move(target), std::move(value)}));
    return absl::OkStatus();
  }
  JINJA_ASSIGN(ExprPtr value, New(line, Captured{}));
  while (SkipOperator("|")) {
    JINJA_ASSIGN(value, ParseFilter(std::move(value)));
  }
  JINJA_ASSIGN(Body inner, ParseBodyTo("endset"));
  body.push_back(
      NewStatement(line, SetBlock{std::move(target), std::move(value), std::move(inner)}));
  return absl::OkStatus();
}

absl::Status Parser::ParseParameters(MacroDefinition& macro) {
  JINJA_CHECK(ExpectOperator("("));
  while (!Current().IsOperator(")")) {
    if (!macro.parameters.empty()) JINJA_CHECK(ExpectOperator(","));
    MacroDefinition::Parameter parameter;
    JINJA_ASSIGN(parameter.name, ExpectName());
    if (SkipOperator("=")) {
      JINJA_ASSIGN(parameter.otherwise, ParseExpression());
    } else if (!macro.parameters.empty() && macro.parameters.back().otherwise != nullptr) {
      return Fail(Current().line, "non-default argument follows default argument");
    }
    macro.parameters.push_back(std::move(parameter));
  }
  return ExpectOperator(")");
}

absl::Status Parser::ParseMacroBody(MacroDefinition& macro, std::string_view end) {
  MacroDefinition* const outer = std::exchange(macro_, &macro);
  const int loops = std::exchange(loops_, 0);
  auto body = ParseBodyTo(end);
  macro_ = outer;
  loops_ = loops;
  if (outer != nullptr) {  // as Jinja, which looks into inner macros too
    outer->reads_varargs = outer->reads_varargs || macro.reads_varargs;
    outer->reads_kwargs = outer->reads_kwargs || macro.reads_kwargs;
    outer->reads_caller = outer->reads_caller || macro.reads_caller;
  }
  JINJA_ASSIGN(macro.body, std::move(body));
  return absl::OkStatus();
}

absl::StatusOr<MacroDefinition> Parser::ParseMacro() {
  MacroDefinition macro;
  JINJA_ASSIGN(macro.name, ExpectName());
  JINJA_CHECK(ParseParameters(macro));
  JINJA_CHECK(ParseMacroBody(macro, "endmacro"));
  return macro;
}

absl::StatusOr<CallBlock> Parser::ParseCallBlock() {
  CallBlock node;
  node.caller.name = "caller";
  if (Current().IsOperator("(")) JINJA_CHECK(ParseParameters(node.caller));
  const int line = Current().line;
  JINJA_ASSIGN(node.call, ParseExpression());
  if (!std::holds_alternative<Call>(node.call->node)) return Fail(line, "expected a call");
  JINJA_CHECK(ParseMacroBody(node.caller, "endcall"));
  return node;
}

absl::StatusOr<FilterBlock> Parser::ParseFilterBlock() {
  FilterBlock node;
  JINJA_ASSIGN(node.value, New(Current().line, Captured{}));
  do {
    JINJA_ASSIGN(node.value, ParseFilter(std::move(node.value)));
  } while (SkipOperator("|"));
  JINJA_ASSIGN(node.body, ParseBodyTo("endfilter"));
  return node;
}

absl::StatusOr<With> Parser::ParseWith() {
  With node;
  while (Current().kind != Token::Kind::kBlockEnd) {
    if (!node.bindings.empty()) JINJA_CHECK(ExpectOperator(","));
    JINJA_ASSIGN(Target target, ParseTargetElement(/*with_namespace=*/false));
    JINJA_CHECK(ExpectOperator("="));
    JINJA_ASSIGN(ExprPtr value, ParseExpression());
    node.bindings.emplace_back(std::move(target), std::move(value));
  }
  JINJA_ASSIGN(node.body, ParseBodyTo("endwith"));
  return node;
}

absl::StatusOr<Target> Parser::ParseTargetElement(bool with_namespace) {
  const Nesting nesting(*this);
  JINJA_CHECK(nesting.Check());
  const int line = Current().line;
  if (SkipOperator("(")) {
    JINJA_ASSIGN(Target target, ParseTarget(with_namespace));
    JINJA_CHECK(ExpectOperator(")"));
    return target;
  }
  Target target;
  target.line = line;
  JINJA_ASSIGN(target.name, ExpectName());
  if (IsOneOf(Token{Token::Kind::kName, line, target.name, {}},
              {"true", "false", "none", "True", "False", "None"})) {
    return Fail(line, Cat("can't assign to '", target.name, "'"));
  }
  if (with_namespace && SkipOperator(".")) {
    JINJA_ASSIGN(target.attribute, ExpectName());
  }
  if (target.name == "loop" && target.attribute.empty() && loops_ > 0) {
    return Fail(line, "can't assign to the special variable 'loop' in a for loop");
  }
  return target;
}

absl::StatusOr<Target> Parser::ParseTarget(bool with_namespace) {
  const int line = Current().line;
  JINJA_ASSIGN(Target first, ParseTargetElement(with_namespace));
  if (!Current().IsOperator(",")) return first;
  Target tuple;
  tuple.line = line;
  tuple.elements.push_back(std::move(first));
  while (SkipOperator(",")) {
    if (AtTupleEnd() || Current().IsName("in") || Current().IsOperator("=")) break;
    JINJA_ASSIGN(Target element, ParseTargetElement(with_namespace));
    tuple.elements.push_back(std::move(element));
  }
  return tuple;
}

}  // namespace qwend::jinja
