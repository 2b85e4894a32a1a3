// Tokens to a template's tree. Grammar, precedence and messages follow Jinja 3.1 with the
// extensions that Hugging Face enables: break, continue and generation.
#pragma once

#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/tokenizer/jinja/ast.h"
#include "engine/tokenizer/jinja/lexer.h"

namespace qwend::jinja {

inline constexpr size_t kMaxSourceBytes = 1 << 20;

// INVALID_ARGUMENT names the line and what is wrong or not covered there, unknown filters and tests
// included.
absl::StatusOr<Body> Parse(std::string_view source);

// Parser's own class; parser.cc holds the statements, parser_expressions.cc the expressions.
class Parser {
 public:
  explicit Parser(std::vector<Token> tokens) : tokens_(std::move(tokens)) {}
  absl::StatusOr<Body> ParseTemplate();

 private:
  class Nesting;
  using Words = std::initializer_list<std::string_view>;

  const Token& Current() const { return tokens_[position_]; }
  const Token& Ahead() const;
  Token Take();
  bool SkipName(std::string_view name);
  bool SkipOperator(std::string_view op);
  absl::Status ExpectOperator(std::string_view op);
  absl::StatusOr<std::string> ExpectName();
  absl::Status ExpectKeyword(std::string_view name);
  absl::Status ExpectBlockEnd();
  absl::Status Fail(int line, std::string_view what) const;
  absl::Status Unexpected() const;
  absl::StatusOr<ExprPtr> New(int line, Expr::Node node) const;

  // Statements up to a block that begins with one of `ends`, whose word is the next token then.
  absl::StatusOr<Body> ParseBody(Words ends);
  // The same up to the one end word, which is taken.
  absl::StatusOr<Body> ParseBodyTo(std::string_view end);
  absl::Status ParseStatement(Body& body);
  absl::StatusOr<If> ParseIf();
  absl::StatusOr<For> ParseFor();
  absl::Status ParseSet(int line, Body& body);
  absl::StatusOr<MacroDefinition> ParseMacro();
  absl::StatusOr<CallBlock> ParseCallBlock();
  absl::StatusOr<FilterBlock> ParseFilterBlock();
  absl::StatusOr<With> ParseWith();
  absl::StatusOr<Target> ParseTarget(bool with_namespace);
  absl::StatusOr<Target> ParseTargetElement(bool with_namespace);
  absl::Status ParseParameters(MacroDefinition& macro);
  absl::Status ParseMacroBody(MacroDefinition& macro, std::string_view end);

  // An expression, or a tuple without parentheses. `with_conditional`: "a if b else c" is allowed.
  absl::StatusOr<ExprPtr> ParseTuple(bool with_conditional);
  absl::StatusOr<ExprPtr> ParseExpression();
  absl::StatusOr<ExprPtr> ParseOr();
  absl::StatusOr<ExprPtr> ParseAnd();
  absl::StatusOr<ExprPtr> ParseNot();
  absl::StatusOr<ExprPtr> ParseComparison();
  absl::StatusOr<ExprPtr> ParseSum();
  absl::StatusOr<ExprPtr> ParseConcat();
  absl::StatusOr<ExprPtr> ParseProduct();
  absl::StatusOr<ExprPtr> ParsePower();
  absl::StatusOr<ExprPtr> ParseUnary(bool with_filters);
  absl::StatusOr<ExprPtr> ParsePrimary();
  absl::StatusOr<ExprPtr> ParseNameOrConstant();
  absl::StatusOr<ExprPtr> ParseParentheses();
  absl::StatusOr<ExprPtr> ParseListDisplay();
  absl::StatusOr<ExprPtr> ParseDictDisplay();
  absl::StatusOr<ExprPtr> ParsePostfix(ExprPtr object);
  absl::StatusOr<ExprPtr> ParseAttribute(ExprPtr object);
  absl::StatusOr<ExprPtr> ParseSubscript(ExprPtr object);
  absl::StatusOr<ExprPtr> ParseFiltersAndTests(ExprPtr input);
  absl::StatusOr<ExprPtr> ParseFilter(ExprPtr input);  // at the filter's name
  absl::StatusOr<ExprPtr> ParseTest(ExprPtr input);    // behind `is`
  absl::StatusOr<CallArguments> ParseArguments();
  bool AtTupleEnd() const;

  std::vector<Token> tokens_;
  size_t position_ = 0;
  int nesting_ = 0;
  int loops_ = 0;                     // around the current statement, inside the innermost macro
  MacroDefinition* macro_ = nullptr;  // innermost, to note the special variables it reads
};

// Counts nested grammar while it lives; the recursion of the parser is bounded by it.
class Parser::Nesting {
 public:
  explicit Nesting(Parser& parser) : parser_(parser) { ++parser_.nesting_; }
  ~Nesting() { --parser_.nesting_; }
  Nesting(const Nesting&) = delete;
  Nesting& operator=(const Nesting&) = delete;
  absl::Status Check() const;

 private:
  Parser& parser_;
};

}  // namespace qwend::jinja
