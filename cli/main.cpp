// The attnspan command.

#include "commands.hpp"

int main(int argc, char** argv) { return attnspan::cli::main_with({argv + 1, argv + argc}); }
