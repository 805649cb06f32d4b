
#compdef mlxcel

_mlxcel_completion() {
  eval $(env _TYPER_COMPLETE_ARGS="${words[1,$CURRENT]}" _MLXCEL_COMPLETE=complete_zsh mlxcel)
}

compdef _mlxcel_completion mlxcel

