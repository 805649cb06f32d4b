# The formula of a Homebrew tap. `url` and `sha256` are those of a release's source archive: docs/install.md.
class Mlxcel < Formula
  desc "Run and serve language models on MLX"
  homepage "https://example.org/mlxcel"
  url "https://example.org/mlxcel/mlxcel-0.1.0.tar.gz"
  sha256 "0000000000000000000000000000000000000000000000000000000000000000"
  license "Apache-2.0"

  depends_on "python@3.13"

  on_macos do
    depends_on arch: :arm64
  end

  def install
    python = Formula["python@3.13"].opt_bin/"python3.13"
    extra = OS.linux? ? "[cpu]" : ""
    system python, "-m", "venv", "--without-pip", libexec
    system python, "-m", "pip", "--python=#{libexec}/bin/python", "install", "#{buildpath}#{extra}"
    bin.install_symlink libexec/"bin/mlxcel"
    bash_completion.install "completions/mlxcel.bash" => "mlxcel"
    zsh_completion.install "completions/mlxcel.zsh" => "_mlxcel"
    fish_completion.install "completions/mlxcel.fish"
  end

  service do
    run [opt_bin/"mlxcel", "serve"]
    environment_variables MLXCEL_MODEL: "smollm2-135m", MLXCEL_PORT: "8080"
    keep_alive successful_exit: false
    process_type :interactive
    log_path var/"log/mlxcel.log"
    error_log_path var/"log/mlxcel.log"
  end

  test do
    assert_match version.to_s, shell_output("#{bin}/mlxcel --version")
    assert_equal "[]", shell_output("MLXCEL_HOME=#{testpath} #{bin}/mlxcel list --json").strip
  end
end
